"""A stand-in for the hub: enough of its HTTP interface for `huggingface_hub` to create, commit to, list and fetch from."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_of_the_tests"


class Hub:
    """Repositories in memory: the files of every commit, and the commits that branches point at."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.branches: dict[str, dict[str, str]] = {}
        self.log: list[str] = []
        self.url = ""

    def create(self, repo: str) -> None:
        self.commits[repo], self.branches[repo] = {}, {}
        self.commit(repo, "main", {})

    def commit(self, repo: str, branch: str, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(f"{repo} {branch} {len(self.commits[repo])}".encode()).hexdigest()
        self.commits[repo][sha], self.branches[repo][branch] = files, sha
        return sha

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        return self.commits[repo][self.branches[repo].get(revision, revision)]


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        self.hub.log.append(f"{self.command} {self.path}")

    def answer(self, status: int, body: Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, what: str) -> None:
        self.answer(404, {"error": f"{what} not found"}, X_Error_Code=f"{what}NotFound", X_Error_Message=f"no {what}")

    def found(self, repo: str, revision: str) -> str | None:
        """The commit that a revision means; answers 404 where there is none."""
        if repo not in self.hub.commits:
            self.missing("Repo")
            return None
        sha = self.hub.branches[repo].get(revision, revision)
        if sha not in self.hub.commits[repo]:
            self.missing("Revision")
            return None
        return sha

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            repo, revision = match.groups()
            if sha := self.found(repo, revision or "main"):
                siblings = [{"rfilename": name} for name in self.hub.commits[repo][sha]]
                self.answer(200, {"_id": sha, "id": repo, "sha": sha, "siblings": siblings})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/.*)?", path):
            repo, revision = match.groups()
            if sha := self.found(repo, revision):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in self.hub.commits[repo][sha].items()
                ]
                self.answer(200, tree)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo, revision, name = match.groups()
            if sha := self.found(repo, revision):
                data = self.hub.commits[repo][sha].get(name)
                if data is None:
                    self.missing("Entry")
                else:
                    self.answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=sha)
        else:
            self.answer(404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self.chunks()
        path = self.path.split("?")[0]
        if path == "/api/validate-yaml":
            front = yaml.safe_load(json.loads(body)["content"].split("---")[1])
            good = front["library_name"] == "vmoer" and re.fullmatch(r"[\w.-]+/[\w.-]+", front.get("base_model", "a/b"))
            self.answer(200, {"errors": [] if good else [{"message": "invalid metadata"}], "warnings": []})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid credentials"}, X_Error_Message="Invalid credentials")
        elif path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            if repo in self.hub.commits:
                self.answer(409, {"error": "exists", "url": f"{self.hub.url}/{repo}"})
            else:
                self.hub.create(repo)
                self.answer(200, {"url": f"{self.hub.url}/{repo}", "name": repo})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", path):
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self.answer(200, {"files": files})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", path):
            repo, branch = match.groups()
            if branch in self.hub.branches[repo]:
                self.answer(409, {"error": "exists"})
            else:
                self.hub.branches[repo][branch] = self.hub.branches[repo]["main"]
                self.answer(200, {})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            repo, branch = match.groups()
            contents = dict(self.hub.files(repo, branch))
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    contents[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "deletedFile":
                    del contents[entry["value"]["path"]]
            sha = self.hub.commit(repo, branch, contents)
            self.answer(200, {"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True})
        else:
            self.answer(404)

    def chunks(self) -> bytes:
        out = b""
        while size := int(self.rfile.readline(), 16):
            out += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return out


@contextmanager
def served() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
