"""What goes wrong around a running server. It runs last: the server of the other tests is killed here."""

import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import served
from conftest import Server, free_port  # type: ignore[attr-defined]

pytestmark = pytest.mark.serving
ERRORS = openai.OpenAIError, httpx.TransportError  # a stream that ends in its middle is an error of the transport
ASKED: dict[str, Any] = {"uncertainty": ["novelty"], "ignore_eos": True}


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def novelty(server: Server) -> list[float]:
    with client(server) as asking:
        made = asking.completions.create(
            model="tiny", prompt=served.PROMPTS[0], max_tokens=8, temperature=0, extra_body=ASKED
        )
    return made.choices[0].uncertainty["tokens"]["novelty"]


def test_a_damaged_run_is_refused_before_the_weights_are_read(granite: tuple[Path, Path], tmp_path: Path) -> None:
    """Oracle: the model's folder has no weights, and the one line is about the run."""
    base, run = (shutil.copytree(folder, tmp_path / folder.name) for folder in granite)
    (base / "model.safetensors").unlink()
    data = bytearray((run / "router.safetensors").read_bytes())
    data[-3] ^= 1
    (run / "router.safetensors").write_bytes(data)
    refused = Server(base, run, tmp_path / "log", free_port())
    assert refused.process.wait(120) == 2
    lines = refused.log.read_text().strip().splitlines()
    assert len(lines) == 1
    assert f"{run / 'router.safetensors'}" in lines[0]


def test_a_killed_engine_is_an_error_for_the_client_and_the_next_start_works(
    server: Server, granite: tuple[Path, Path], work: Path
) -> None:
    """kill -9 in the middle of a stream and of a whole answer. Oracle: the same request before and after."""
    before, found = novelty(server), []
    more: dict[str, Any] = dict(model="tiny", prompt="the", max_tokens=250, extra_body=ASKED)

    def ask(asking: openai.OpenAI) -> None:
        try:
            found.append(asking.completions.create(**more))
        except openai.OpenAIError as error:
            found.append(error)

    # both clients are there before either asks: to make one takes as long as many tokens
    with client(server) as other, client(server) as asking:
        waiting = threading.Thread(target=ask, args=[other])
        waiting.start()
        events = asking.completions.create(stream=True, **more)
        next(iter(events))
        server.engine().kill()
        with pytest.raises(ERRORS):
            for _ in events:
                pass
        waiting.join(120)
        assert not waiting.is_alive()
    assert isinstance(found[0], openai.OpenAIError)
    server.process.wait(60)  # vLLM's own: a server without an engine ends
    limit = served.letters_threshold(work / "letters.json", *granite)
    again = Server(*granite, work / "again.log", free_port(), "--threshold", str(limit))
    try:
        again.ready()
        assert novelty(again) == pytest.approx(before, rel=1e-4)
        assert_options_decide(again, granite)
    finally:
        again.stop()


def assert_options_decide(server: Server, granite: tuple[Path, Path]) -> None:
    """A threshold on an option's confidence decides where options are asked for. Oracle: transformers and the map by hand."""
    verdicts = []
    more: dict[str, Any] = dict(model="tiny", max_tokens=1, extra_body={"uncertainty": {"options": 3}})
    with client(server) as asking:
        for prompt in served.PROMPTS:
            made = asking.chat.completions.create(messages=[{"role": "user", "content": prompt}], **more)
            said, value = made.choices[0].uncertainty, 1 - served.options_of(*granite, prompt).max()
            assert said["decision"]["value"] == pytest.approx(value, rel=1e-4)
            assert said["abstain"] is bool(value > said["decision"]["threshold"])
            verdicts.append(said["abstain"])
    assert set(verdicts) == {True, False}
    metrics = server.get("/metrics")
    assert f"vmoer_judged_total {len(verdicts)}.0" in metrics  # and not the answers without options
    assert f"vmoer_abstained_total {sum(verdicts)}.0" in metrics
