"""The server itself, asked by the `openai` client. Oracle: `vmoer.record` on the same model in transformers."""

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import served
from conftest import Server  # type: ignore[attr-defined]

pytestmark = pytest.mark.serving
SIGNALS = {"gate_entropy", "logit_variance", "mc_logit_variance", "novelty"}
EXAMPLES = Path(__file__).parents[2] / "examples" / "serving"
NEW = 8
GREEDY: dict[str, Any] = dict(model="tiny", max_tokens=NEW, temperature=0)
EXTRA: dict[str, Any] = {"uncertainty": True, "ignore_eos": True, "return_token_ids": True, "min_tokens": NEW}
"""As in transformers no text ends early, and none is cut at its end token."""
QUESTION = "why is the sky blue"


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def expected(granite: tuple[Path, Path]) -> list[dict[str, Any]]:
    return served.recorded(*granite, served.PROMPTS, NEW)


def close(ours: list[float], theirs: Any) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Equal, but for the last digits: another batch may have been computed in another order."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        close(ours[name], theirs[name])


def wanted(want: dict[str, Any], name: str) -> np.ndarray:
    """The recorded signal of the new tokens, mean over layers."""
    return np.array(want["signals"][name])[want["prompt_tokens"] - 1 :].mean(-1)


def text(client: openai.OpenAI, prompt: str, extra: dict[str, Any] | None = None, **more: Any) -> Any:
    return client.completions.create(prompt=prompt, extra_body=EXTRA | (extra or {}), **GREEDY | more)


def test_a_completion_has_what_transformers_records(client: openai.OpenAI, expected: list[dict[str, Any]]) -> None:
    for want in expected:
        choice = text(client, want["prompt"], logprobs=2).choices[0]
        said = choice.uncertainty
        assert choice.token_ids == want["ids"][want["prompt_tokens"] :]
        assert len(choice.logprobs.tokens) == NEW
        assert set(said["tokens"]) == SIGNALS
        for name, values in said["tokens"].items():
            close(values, wanted(want, name))
            close([said["sequence"][f"mean_{name}"]], [wanted(want, name).mean()])
            close([said["sequence"][f"max_{name}"]], [wanted(want, name).max()])


def test_layers_experts_and_the_prompt_on_request(client: openai.OpenAI, expected: list[dict[str, Any]]) -> None:
    want = expected[1]
    asked = {"signals": ["novelty"], "layers": True, "prompt": True}
    said = text(client, want["prompt"], {"uncertainty": asked}).choices[0].uncertainty
    assert set(said["tokens"]) == {"novelty"}
    assert said["layers"]["layers"] == served.LAYERS
    first = want["prompt_tokens"] - 1
    close(said["layers"]["signals"]["novelty"], np.array(want["signals"]["novelty"])[first:])
    assert np.array_equal(np.sort(said["layers"]["experts"], -1), np.sort(np.array(want["experts"])[first:], -1))
    close(said["prompt"]["novelty"], np.array(want["signals"]["novelty"])[: first + 1].mean(-1))


def test_who_does_not_ask_gets_what_vllm_gives(client: openai.OpenAI) -> None:
    for extra in ({}, {"uncertainty": False}, {"uncertainty": None}):
        made = client.completions.create(prompt="the quick", extra_body=extra, **GREEDY)
        assert "uncertainty" not in made.choices[0].model_dump()
        assert made.choices[0].routed_experts is None
        events = list(client.completions.create(prompt="the quick", stream=True, extra_body=extra, **GREEDY))
        assert "uncertainty" not in json.dumps([event.model_dump() for event in events])


def chat(client: openai.OpenAI, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": QUESTION}]
    return client.chat.completions.create(messages=messages, extra_body=EXTRA, **GREEDY | more)


def streamed(events: Any, index: int = 0) -> dict[str, Any]:
    """The parts of one choice put together."""
    whole: dict[str, Any] = {"tokens": {name: [] for name in SIGNALS}, "text": "", "events": 0}
    for event in events:
        for choice in event.choices:
            said = getattr(choice, "uncertainty", None)
            if choice.index != index:
                continue
            whole["text"] += (choice.text if hasattr(choice, "text") else choice.delta.content) or ""
            for name, values in (said or {}).get("tokens", {}).items():
                whole["tokens"][name] += values
                whole["events"] += bool(values)
            whole |= {key: value for key, value in (said or {}).items() if key != "tokens"}
    return whole


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_streamed_is_whole(client: openai.OpenAI, kind: str) -> None:
    """The same numbers, over several events, and the sequence with the last."""
    if kind == "chat":
        choice, events = chat(client).choices[0], chat(client, stream=True)
        content = choice.message.content
    else:
        choice = text(client, "the quick brown fox").choices[0]
        events, content = text(client, "the quick brown fox", stream=True), choice.text
    whole = streamed(events)
    assert whole["text"] == content
    assert whole["events"] > 4 * len(SIGNALS)
    same(whole["tokens"], choice.uncertainty["tokens"])
    same(
        {name: [value] for name, value in whole["sequence"].items()},
        {k: [v] for k, v in choice.uncertainty["sequence"].items()},
    )
    assert whole["abstain"] is choice.uncertainty["abstain"]
    assert all(len(values) == NEW for values in whole["tokens"].values())


def test_a_chat_has_what_transformers_records(client: openai.OpenAI, granite: tuple[Path, Path]) -> None:
    """Of the text that the chat template makes."""
    messages = [{"role": "user", "content": QUESTION}]
    asked = served.tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (want,) = served.recorded(*granite, [asked], NEW)
    said = chat(client).choices[0].uncertainty
    assert set(said["tokens"]) == SIGNALS
    for name, values in said["tokens"].items():
        close(values, wanted(want, name))


def test_layers_and_the_prompt_in_a_stream_are_those_of_the_whole(client: openai.OpenAI) -> None:
    asked = {"uncertainty": {"signals": ["novelty"], "layers": True, "prompt": True}}
    whole = text(client, served.PROMPTS[1], asked).choices[0].uncertainty
    events = list(text(client, served.PROMPTS[1], asked, stream=True))
    said = [getattr(choice, "uncertainty", None) or {} for event in events for choice in event.choices]
    layers = [part["layers"] for part in said if "layers" in part]
    assert len(layers) > 4
    close([row for part in layers for row in part["signals"]["novelty"]], whole["layers"]["signals"]["novelty"])
    assert [row for part in layers for row in part["experts"]] == whole["layers"]["experts"]
    (prompt,) = [part["prompt"] for part in said if "prompt" in part]  # once
    same(prompt, whole["prompt"])


def test_an_end_token_has_its_numbers_too(client: openai.OpenAI, expected: list[dict[str, Any]]) -> None:
    """After three tokens nothing is likelier than the end. Oracle: where transformers chose its first four."""
    want, ends = expected[0], {"ignore_eos": False, "min_tokens": 3}
    choice = text(client, want["prompt"], ends, logit_bias={"2": 100}).choices[0]
    assert choice.finish_reason == "stop"
    first = want["prompt_tokens"]
    assert choice.token_ids == [*want["ids"][first : first + 3], 2]
    for name, values in choice.uncertainty["tokens"].items():
        close(values, wanted(want, name)[:4])
    whole = streamed(text(client, want["prompt"], ends, logit_bias={"2": 100}, stream=True))
    assert whole["text"] == choice.text
    same(whole["tokens"], choice.uncertainty["tokens"])
    close([whole["sequence"]["mean_novelty"]], [choice.uncertainty["sequence"]["mean_novelty"]])


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_two_answers_to_a_request(client: openai.OpenAI, kind: str) -> None:
    """n = 2, sampled: each has the numbers of its own tokens, whole and streamed."""

    def ask(**more: Any) -> Any:
        more |= dict(n=2, temperature=1.0, seed=5)
        return chat(client, **more) if kind == "chat" else text(client, "the quick brown fox", **more)

    choices = ask().choices
    assert choices[0].token_ids != choices[1].token_ids
    tokens = [choice.uncertainty["tokens"]["novelty"] for choice in choices]
    close(tokens[0][:1], tokens[1][:1])  # both were chosen at the prompt's last token
    assert not np.allclose(tokens[0], tokens[1], rtol=1e-4)
    events = list(ask(stream=True))
    for choice in choices:
        same(streamed(events, choice.index)["tokens"], choice.uncertainty["tokens"])


def test_a_stop_string_ends_the_numbers_too(client: openai.OpenAI) -> None:
    whole = text(client, "the quick brown fox", {"min_tokens": 0}, logprobs=0).choices[0]
    letters = [token for token in whole.logprobs.tokens if token.isalpha()]
    stop = letters[len(letters) // 2]
    cut = text(client, "the quick brown fox", {"min_tokens": 0}, logprobs=0, stop=stop).choices[0]
    assert cut.finish_reason == "stop"
    count = len(cut.token_ids)
    assert 0 < count < NEW
    assert len(cut.uncertainty["tokens"]["novelty"]) == count
    close(cut.uncertainty["tokens"]["novelty"], whole.uncertainty["tokens"]["novelty"][:count])


def test_several_prompts_in_a_request(client: openai.OpenAI, expected: list[dict[str, Any]]) -> None:
    made = client.completions.create(prompt=served.PROMPTS, extra_body=EXTRA, **GREEDY)
    for choice, want in zip(made.choices, expected, strict=True):
        close(choice.uncertainty["tokens"]["novelty"], wanted(want, "novelty"))
    events = list(client.completions.create(prompt=served.PROMPTS, stream=True, extra_body=EXTRA, **GREEDY))
    for choice in made.choices:
        same(streamed(events, choice.index)["tokens"], choice.uncertainty["tokens"])


def test_the_threshold_decides(client: openai.OpenAI, expected: list[dict[str, Any]]) -> None:
    """Oracle: the recorded mean novelty against the number in the file."""
    verdicts = []
    for want in expected:
        said = text(client, want["prompt"], {"uncertainty": ["gate_entropy"]}).choices[0].uncertainty
        mean = wanted(want, "novelty").mean()
        assert said["abstain"] is bool(mean > said["decision"]["threshold"])
        close([said["decision"]["value"]], [mean])
        assert (said["decision"]["risk"], said["decision"]["confidence"]) == (0.1, 0.9)
        verdicts.append(said["abstain"])
    assert set(verdicts) == {True, False}


def test_options_have_calibrated_probabilities(client: openai.OpenAI, granite: tuple[Path, Path]) -> None:
    """By the run's calibrator, which nobody asked for. Oracle: the letters' logits in transformers and the map by hand."""
    messages: Any = [{"role": "user", "content": served.PROMPTS[1]}]
    expected = served.options_of(*granite, served.PROMPTS[1])
    for more in ({}, {"n": 2, "temperature": 1.0}):
        extra = {"uncertainty": {"options": 3}, "ignore_eos": True}
        asked: dict[str, Any] = dict(messages=messages, extra_body=extra, **GREEDY | more)
        made = client.chat.completions.create(**asked)
        events = list(client.chat.completions.create(stream=True, **asked))
        for choice in made.choices:
            assert choice.logprobs is None
            for said in (choice.uncertainty, streamed(events, choice.index)):
                assert said["options"]["calibrator"] == "vector"
                assert list(said["options"]["probabilities"]) == ["A", "B", "C"]
                close(list(said["options"]["probabilities"].values()), expected)
    assert "options" not in chat(client).choices[0].uncertainty


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"options": 1}, "options=1 is no number of options from 2 to 10"),
        ({"options": 4}, "the calibrator was fitted on questions with 3 options, and one has 4"),
        (["novelti"], "unknown signal 'novelti'; did you mean novelty"),
        ("yes", "uncertainty='yes': give true, a list of signals"),
        ({"layer": True}, "uncertainty has 'layer'"),
        ({"layers": 1}, "layers=1 is neither true nor false"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(client: openai.OpenAI, asked: Any, message: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=re.escape(message)):
            text(client, "the", {"uncertainty": asked}, stream=stream)
        with pytest.raises(openai.BadRequestError, match="options and logprobs cannot be asked for at once"):
            text(client, "the", {"uncertainty": {"options": 3}}, stream=stream, logprobs=0)


def test_many_at_once_each_with_its_own(server: Server, granite: tuple[Path, Path]) -> None:
    """64 requests together, half of them streamed, a quarter left in the middle. Oracle: transformers on every prompt alone."""
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "why",
        "is",
        "sky",
        "blue",
        "light",
        "air",
        "hello",
        "world",
        "token",
        "model",
    ]
    prompts = [" ".join(words[(i + j * (i % 5 + 1)) % len(words)] for j in range(2 + i % 6)) for i in range(64)]
    expected = served.recorded(*granite, prompts, NEW)

    async def ask(client: openai.AsyncOpenAI, place: int) -> Any:
        more: dict[str, Any] = dict(
            model="tiny", prompt=prompts[place], max_tokens=NEW, temperature=0, extra_body=EXTRA
        )
        if place % 4 == 3:
            stream = await client.completions.create(stream=True, **more)
            async for _ in stream:
                await stream.close()
                return None
        if place % 2:
            events = [event async for event in await client.completions.create(stream=True, **more)]
            return streamed(events)["tokens"]
        return (await client.completions.create(**more)).choices[0].uncertainty["tokens"]

    async def together() -> list[Any]:
        limits = httpx.Limits(max_connections=80)
        async with httpx.AsyncClient(limits=limits, timeout=180) as http:
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http)
            return await asyncio.gather(*(ask(client, place) for place in range(64)))

    answers = asyncio.run(together())
    assert sum(answer is None for answer in answers) == 16
    for answer, want in zip(answers, expected, strict=True):
        if answer is not None:
            for name in SIGNALS:
                close(answer[name], wanted(want, name))


def test_metrics_count_every_answer(client: openai.OpenAI, server: Server) -> None:
    """Oracle: a request's own numbers, against the difference of two scrapes."""

    def scraped() -> dict[str, float]:
        lines = [line for line in server.get("/metrics").splitlines() if line.startswith("vmoer_")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    text(client, "warm")
    before = scraped()
    asked = text(client, served.PROMPTS[0]).choices[0].uncertainty
    client.completions.create(prompt=served.PROMPTS[0], **GREEDY | {"max_tokens": 3})  # asks for nothing, and counts
    end = time.monotonic() + 10
    while (after := scraped())["vmoer_answers_total"] < before["vmoer_answers_total"] + 2:
        assert time.monotonic() < end
    names = [f'vmoer_{kind}_sum{{signal="novelty"}}' for kind in ("sequence", "first_token")]
    sums = [after[name] - before[name] for name in names]
    novelty = asked["tokens"]["novelty"]
    close(sums, [np.mean(novelty) + np.mean(novelty[:3]), 2 * novelty[0]])
    count = 'vmoer_sequence_count{signal="novelty"}'
    assert after[count] - before[count] == 2
    above = [np.mean(novelty), np.mean(novelty[:3])]
    limit = asked["decision"]["threshold"]
    assert after["vmoer_abstained_total"] - before["vmoer_abstained_total"] == sum(value > limit for value in above)
    assert after["vmoer_judged_total"] - before["vmoer_judged_total"] == 2
    for kind in ("sequence", "first_token"):  # a bucket counts what is not above its bound
        bounds = [name for name in after if name.startswith(f"vmoer_{kind}_bucket{{") and 'signal="novelty"' in name]
        grown = {re.findall('le="([^"]+)"', name)[0]: after[name] - before[name] for name in bounds}
        values = above if kind == "sequence" else novelty[:1] * 2
        assert len(grown) > 10
        assert grown == {bound: sum(value <= float(bound) for value in values) for bound in grown}
    assert "vllm:" in server.get("/metrics")
    offered = {re.split("[ {]", line)[0] for line in server.get("/metrics").splitlines()}
    panels = json.loads((EXAMPLES / "grafana.json").read_text())["panels"]
    shown = {name for panel in panels for x in panel["targets"] for name in re.findall(r"vmoer_\w+", x["expr"])}
    assert {"vmoer_first_token_bucket", "vmoer_sequence_bucket", "vmoer_abstained_total"} <= shown <= offered
