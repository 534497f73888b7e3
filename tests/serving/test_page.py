"""The playground against a running server, in a headless Chromium: type, stream, click, no error on the console.

Oracle: what the browser itself measures of the page.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import browser
import pytest
from conftest import Server  # type: ignore[attr-defined]

pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium on this machine"),
]
TOKENS = "[...document.querySelectorAll('.token')]"


async def visited(server: Server, folder: Path, pictures: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with browser.browsing(f"{server.url}/vmoer", folder) as page:
        await page.size(1280, 900)
        await page.run("$('prompt').value = 'the quick brown fox'; $('chat').checked = false; $('length').value = 12")
        await page.run("$('go').click()")
        await page.until("$('said').textContent.includes('mean novelty')")
        found["count"] = await page.run(f"{TOKENS}.length")
        found["text"] = await page.run("$('answer').textContent")
        found["colours"] = await page.run(f"{TOKENS}.map(x => getComputedStyle(x).backgroundColor)")
        found["novelty"] = await page.run("tokens.map(x => x.signals.novelty)")
        await page.run(f"{TOKENS}[3].click()")
        found["detail"] = await page.run("$('detail').textContent")
        found["bars"] = await page.run("document.querySelectorAll('#detail rect.layer').length")
        await page.picture(pictures / "wide.png")
        await page.run("$('signal').value = 'gate_entropy'; $('signal').onchange()")
        found["recoloured"] = await page.run(f"{TOKENS}.map(x => getComputedStyle(x).backgroundColor)")
        found["light"] = await page.run("getComputedStyle(document.body).backgroundColor")
        await page.run("$('theme').click()")
        found["dark"] = await page.run("getComputedStyle(document.body).backgroundColor")
        await page.picture(pictures / "dark.png")
        await page.size(390, 800, mobile=True)
        found["overflow"] = await page.run("document.documentElement.scrollWidth - innerWidth")
        await page.picture(pictures / "phone.png")
        await page.run("$('chat').checked = true; $('go').click()")
        await page.until("$('said').textContent.includes('mean novelty')")
        found["chat"] = await page.run(f"{TOKENS}.length")
        await page.run("fetch = async () => new Response('{}', {status: 401}); $('go').click()")
        await page.until("$('said').textContent.includes('API key')")
        found["loaded"] = await page.run("performance.getEntriesByType('resource').map(x => x.name)")
        found["said"] = page.said
    return found


def test_type_stream_click(server: Server, tmp_path: Path) -> None:
    pictures = Path(os.environ.get("VMOER_PICTURES", tmp_path))
    found = asyncio.run(visited(server, tmp_path / "profile", pictures))
    assert found["said"] == []
    assert found["count"] == 12
    assert len(found["text"]) > 5
    assert len(set(found["colours"])) > 3
    most, least = (found["colours"][found["novelty"].index(f(found["novelty"]))] for f in (max, min))
    assert most != least
    assert found["recoloured"] != found["colours"]
    assert "novelty" in found["detail"]
    assert "experts" in found["detail"]
    assert found["bars"] == 2
    assert found["light"] != found["dark"]
    assert found["overflow"] <= 0
    assert 0 < found["chat"] <= 12  # a chat may end early
    assert all(name.startswith(server.url) for name in found["loaded"])
