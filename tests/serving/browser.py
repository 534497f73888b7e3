"""A headless Chromium, driven over its own protocol: as much of it as a test of one page needs."""

import asyncio
import json
import os
import shutil
import subprocess
import urllib.request
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import websockets

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def _is_error(found: dict[str, Any]) -> bool:
    logged = found["method"] == "Log.entryAdded" and found["params"]["entry"]["level"] == "error"
    return logged or found["method"] == "Runtime.exceptionThrown"


class Page:
    def __init__(self, socket: Any) -> None:
        self.socket, self.number = socket, 0
        self.waiting: dict[int, Any] = {}
        self.said: list[str] = []
        """Errors on the console, and exceptions."""

    async def listen(self) -> None:
        async for message in self.socket:
            found = json.loads(message)
            if "id" in found:
                self.waiting.pop(found["id"]).set_result(found.get("result", found))
            elif _is_error(found):
                self.said.append(json.dumps(found["params"])[:500])

    async def send(self, method: str, **parameters: Any) -> Any:
        self.number += 1
        self.waiting[self.number] = asyncio.get_running_loop().create_future()
        answer = self.waiting[self.number]
        await self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        return await asyncio.wait_for(answer, 60)

    async def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page."""
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str, seconds: float = 60) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while not await self.run(expression):
            assert asyncio.get_running_loop().time() < end, expression
            await asyncio.sleep(0.1)

    async def size(self, width: int, height: int, mobile: bool = False) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    async def picture(self, path: Path) -> None:
        found = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(b64decode(found["data"]))


@asynccontextmanager
async def browsing(url: str, folder: Path) -> AsyncIterator[Page]:
    """The page at an address, in a browser with a profile of its own."""
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
    command = [CHROMIUM, *options, f"--user-data-dir={folder}", "about:blank"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=os.environ | {"HOME": str(folder)}, **quiet)
    try:
        active = folder / "DevToolsActivePort"
        for _ in range(600):
            if active.exists() and len(active.read_text().splitlines()) > 1:
                break
            await asyncio.sleep(0.1)
        port = active.read_text().splitlines()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as listed:
            target = next(tab for tab in json.load(listed) if tab["type"] == "page")
        async with websockets.connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
            page = Page(socket)
            listening = asyncio.create_task(page.listen())
            for domain in ("Page", "Runtime", "Log"):
                await page.send(f"{domain}.enable")
            await page.send("Page.navigate", url=url)
            await page.until("document.readyState === 'complete' && location.href !== 'about:blank'")
            yield page
            listening.cancel()
    finally:
        process.terminate()
        process.wait(30)
