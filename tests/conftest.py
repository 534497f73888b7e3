import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hub_server
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from hypothesis import settings

# a shell that starts the tests in the background lets them, and what they start, ignore Ctrl-C, which some of them test
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("vmoer", deadline=None, derandomize=True)
settings.load_profile("vmoer")


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[hub_server.Hub]:
    with hub_server.served() as server:
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        disable_progress_bars()
        yield server
        enable_progress_bars()
