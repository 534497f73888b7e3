"""Small files that ask for much: under a limit of the address space each is refused in one line, in seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

from attacks.targets import make_run

PROGRAM = """
import resource, sys, time
sys.path[:0] = {path!r}
import tiny, vmoer, json
from attacks.targets import judge
from pathlib import Path
from vmoer.saved import manifest

base, run = tiny.model("granitemoe"), Path(sys.argv[1])
vmoer.detach(vmoer.load(base, run))
base = tiny.model("granitemoe")
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
for name, content in json.loads(sys.stdin.read()):
    whole = (run / name).read_bytes()
    started = time.monotonic()
    (run / name).write_text(content)
    manifest.seal(run)
    try:
        vmoer.load(base, run)
        outcome = "taken"
    except MemoryError:
        outcome = "memory"
    except Exception as error:
        outcome = judge(error)
    print("hang" if time.monotonic() - started > 10 else outcome, flush=True)
    (run / name).write_bytes(whole)
"""


def changed(run: Path, name: str, part: str | None, **values: object) -> tuple[str, str]:
    found = json.loads((run / name).read_text())
    (found if part is None else found[part]).update(values)
    return name, json.dumps(found)


def test_bombs_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    adapter = "adapter_config.json"
    bombs = [
        changed(run, "router.json", "config", samples=10**7),
        changed(run, "router.json", "config", rank=10**7),
        changed(run, "router.json", "config", layers=list(range(10**5))),
        changed(run, adapter, None, r=10**7),
        changed(run, adapter, None, target_modules="(a+)+$"),
        changed(run, adapter, None, target_modules=["(a|a)*b"]),
        changed(run, adapter, None, layer_replication=[[0, 2]] * 10**5),
        changed(run, adapter, None, rank_pattern={"q_proj": 10**7}),
        ("router.json", "[" * 10**6),
        ("router.json", "9" * 10**6),
        ("run.json", '{"a":' * 10**5),
    ]
    program = PROGRAM.format(path=sys.path)
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(run)],
        input=json.dumps(bombs),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert told.stdout.split() == ["refused"] * len(bombs), told.stderr[-2000:]


def test_what_is_no_plain_file_is_never_waited_for(tmp_path: Path) -> None:
    """Each file of a run in turn as a pipe, a device, a folder, a terabyte without content, a link that leads out."""
    run = make_run(tmp_path / "run")
    (tmp_path / "elsewhere").write_text("{}")
    names = ["manifest.json", "router.json", "router.safetensors", "run.json", "adapter_model.safetensors"]
    kinds = ["pipe", "device", "folder", "sparse", "link"]
    program = f"""
import os, sys, time
sys.path[:0] = {sys.path!r}
from pathlib import Path
import tiny, vmoer
from attacks.targets import judge
base, run = tiny.model("granitemoe"), Path(sys.argv[1])
for kind in {kinds!r}:
    for name in {names!r}:
        whole, path = (run / name).read_bytes(), run / name
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "folder":
            path.mkdir()
        elif kind == "link":
            path.symlink_to("../elsewhere")
        else:
            path.touch()
            os.truncate(path, 2**42)
        started = time.monotonic()
        try:
            vmoer.load(base, run)
            print("taken")
        except Exception as error:
            print(judge(error) if time.monotonic() - started < 10 else "hang", flush=True)
        path.rmdir() if kind == "folder" else path.unlink()
        path.write_bytes(whole)
"""
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(run)], capture_output=True, text=True, timeout=120
    )
    assert told.stdout.split() == ["refused"] * len(names) * len(kinds), told.stderr[-2000:]
