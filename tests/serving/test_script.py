"""The playground's script without a browser: a chat, a server that wants an API key, a run with fewer signals.

Oracle: the texts that a stand-in for the server gives (page.js).
"""

import shutil
import subprocess
from pathlib import Path

import pytest

import vmoer

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="no Node on this machine")
def test_the_script_of_the_playground() -> None:
    assert NODE is not None
    page = Path(vmoer.__file__).parent / "serving" / "playground.html"
    done = subprocess.run([NODE, Path(__file__).with_name("page.js"), page], capture_output=True, text=True, timeout=60)
    assert done.stdout == "as it should be\n", done.stderr
