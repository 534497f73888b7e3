"""Generation. The oracle is one plain forward pass over each finished text, alone and without padding or cache.

A token's signals are read where it was chosen, so new token n of a prompt of P tokens is compared with position P + n - 1.
"""

import copy
import inspect
from typing import Any

import pytest
import tiny
import torch
from test_contract import METHODS, prepare
from tiny_letters import TOKENIZER, tiny_model
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, GenerationMixin

import vmoer
from vmoer.demo import model_path
from vmoer.errors import InputError, RunError
from vmoer.inference.generation import Answer, _pieces
from vmoer.live.attach import attachment_of, sampled
from vmoer.live.following import until_end

LENGTHS = (9, 6, 11)
generate: Any = vmoer.generate  # one prompt gives an answer, several give a list


def one_pass(model: Any, ids: Tensor) -> Any:
    with vmoer.record(model) as rec, torch.no_grad():
        model(input_ids=ids.unsqueeze(0))
    return rec


def agrees(model: Any, out: Tensor, rec: Any, prompts: Tensor) -> None:
    """Every row of the output against one pass over its real tokens: signals to 1e-4, and the same experts."""
    generated, width = rec.generated, prompts.shape[1]
    assert torch.equal(generated.tokens, out[:, width:])
    assert rec.mask.shape == (len(out), out.shape[1] - 1)
    copies = len(out) // len(prompts)
    for row, ids in enumerate(out):
        new = int(generated.mask[row].sum())
        start = width - int((prompts[row // copies] != 0).sum())
        assert rec.mask[row].nonzero().flatten().tolist() == list(range(start, width + new - 1))
        text = ids[start : width + new]
        whole, routed = one_pass(model, text), slice(start, width + new - 1)
        assert whole.signals.keys() == rec.signals.keys()
        for name, value in whole.signals.items():
            torch.testing.assert_close(rec.signals[name][:, row, routed], value[:, 0, :-1], atol=1e-4, rtol=1e-4)
            chosen_at = value[:, 0, width - start - 1 : -1]
            torch.testing.assert_close(generated.signals[name][:, row, :new], chosen_at, atol=1e-4, rtol=1e-4)
        experts = whole.experts.sort(-1).values[:, 0, :-1]
        assert torch.equal(rec.experts.sort(-1).values[:, row, routed], experts)
        assert torch.equal(generated.experts[:, row, :new].sort(-1).values, experts[:, width - start - 1 :])


@pytest.mark.parametrize("name", ["granitemoe", "deepseek_v3", "granitemoehybrid"])
@pytest.mark.parametrize("key", METHODS)
def test_signals_are_those_of_one_pass_over_the_finished_text(name: str, key: str) -> None:
    """Greedy, cached, prompts of three lengths padded on the left, and rows that end at different tokens."""
    model, left = prepare(name, key), tiny.batch(LENGTHS, side="left")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    free = model.generate(**left, **options, eos_token_id=None)
    eos = free[0, LENGTHS[2] + 2].item()  # what the first row says third
    with vmoer.record(model) as rec:
        out = model.generate(**left, **options, eos_token_id=eos)
    assert len(set(rec.generated.mask.sum(1).tolist())) > 1
    assert torch.equal(out, model.generate(**left, **options, eos_token_id=eos))
    agrees(model, out, rec, left["input_ids"])


WAYS: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "temperature": 2.0, "num_return_sequences": 2},
    "beam search": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "beam sampling": {"do_sample": True, "num_beams": 3, "temperature": 3.0},
    "no cache": {"do_sample": False, "use_cache": False},
    "beams without a cache": {"do_sample": False, "num_beams": 3, "use_cache": False},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "prefill in chunks": {"do_sample": False, "prefill_chunk_size": 4},
    "stopped by a criterion": {"do_sample": False, "stopping_criteria": [lambda ids, scores: ids[:, -1] % 3 == 0]},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", ["vglr-fc", "vtsr"])
def test_ways_of_generating(way: str, key: str) -> None:
    """The call returns what it returns without a record, and the record follows its rows."""
    model, left, outs = prepare("granitemoe", key), tiny.batch(LENGTHS, side="left"), []
    options = WAYS[way] | {"max_new_tokens": 7, "eos_token_id": [2, 5, 7, 11, 13]}
    for recorded in (False, True):
        torch.manual_seed(3)
        if recorded:
            with vmoer.record(model) as rec:
                outs.append(model.generate(**left, **options))
        else:
            outs.append(model.generate(**left, **options))
    assert torch.equal(*outs)
    if "num_beams" in options:  # rows did move, so a record that took them in place would be wrong
        assert rec.generation is not None
        assert (rec.generation.rows_BN.diff(dim=1) != 0)[rec.generation.real_BN[:, 1:]].any()
    agrees(model, outs[1], rec, left["input_ids"])


def test_the_call_may_be_worded_in_any_way() -> None:
    """Positional ids, a configuration object, no mask, a dictionary in return; the caller's objects stay as they were."""
    model = prepare("granitemoe", "vglr-mf")
    left = tiny.batch(LENGTHS, side="left")
    config = GenerationConfig(max_new_tokens=5, num_beams=2, do_sample=False, pad_token_id=0, eos_token_id=2)
    before = config.to_dict()
    with vmoer.record(model) as rec:
        out = model.generate(left["input_ids"], config)
    assert config.to_dict() == before
    agrees(model, out, rec, left["input_ids"])
    with vmoer.record(model) as rec:
        found = model.generate(left["input_ids"], num_beams=2, max_new_tokens=5, return_dict_in_generate=True)
    assert torch.equal(found.sequences, out)
    agrees(model, out, rec, left["input_ids"])
    with vmoer.record(model) as rec:  # from BOS alone
        out = model.generate(max_new_tokens=4, do_sample=False)
    agrees(model, out, rec, torch.ones(1, 1))


def test_through_a_peft_model() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny.model("granitemoe"), LoraConfig(target_modules=["q_proj"], r=2)).eval()
    vmoer.attach(model, vmoer.FullCovariance())
    left = tiny.batch(LENGTHS, side="left")
    with vmoer.record(model) as rec:
        out = model.generate(**left, max_new_tokens=5, num_beams=2)
    agrees(model, out, rec, left["input_ids"])


def refused(model: Any) -> dict[str, tuple[dict[str, Any], str]]:
    ids = tiny.batch((6,))["input_ids"]
    cache = model(input_ids=ids[:, :3], use_cache=True).past_key_values
    return {
        "an assistant": ({"assistant_model": tiny.model("granitemoe")}, "assisted generation"),
        "prompt lookup": ({"prompt_lookup_num_tokens": 2}, "assisted generation"),
        "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        "groups of beams": ({"num_beams": 4, "num_beam_groups": 2}, "group beam search"),
        "guidance": ({"guidance_scale": 1.5}, "guidance runs the model twice"),
        "a custom loop": ({"custom_generate": lambda model, **_: None}, "decoding loop of its own"),
        "token healing": ({"token_healing": True}, "token healing"),
        "paged": ({"cache_implementation": "paged"}, "continuous batching"),
        "embeddings": ({"input_ids": None, "inputs_embeds": model.get_input_embeddings()(ids)}, "no ids"),
        "a used cache": ({"past_key_values": cache}, "before this record began"),
    }


@torch.no_grad()
def test_what_cannot_be_aligned_is_refused_in_one_line() -> None:
    model = prepare("granitemoe", "vglr-mf")
    ids = tiny.batch((6,))["input_ids"]
    for name, (options, reason) in refused(model).items():
        with pytest.raises(InputError, match=reason) as caught, vmoer.record(model) as rec:
            model.generate(**({"input_ids": ids} | options), max_new_tokens=2)
        assert str(caught.value).count("\n") == 0, name
        assert not rec.passes, name


@torch.no_grad()
def test_a_record_is_of_one_generation() -> None:
    model, batch = prepare("granitemoe", "vglr-mf"), tiny.batch((6,))
    with vmoer.record(model) as rec:
        model.generate(**batch, max_new_tokens=2)
        with pytest.raises(InputError, match="one record for each generate"):
            model.generate(**batch, max_new_tokens=2)
        assert rec.signals["gate_entropy"].shape == (2, 1, 7)
        model(**batch)
    with pytest.raises(InputError, match="a generation and other passes"):
        rec.signals  # noqa: B018
    with vmoer.record(model) as rec:
        model(**batch)
        with pytest.raises(InputError, match="other passes already"):
            model.generate(**batch, max_new_tokens=2)
    with pytest.raises(InputError, match="nothing was generated"):
        rec.generated  # noqa: B018


def test_a_generate_that_was_replaced_is_refused_and_kept() -> None:
    model, batch = prepare("granitemoe", "map"), tiny.batch((6,))
    mine = model.generate = lambda **_: "mine"
    with pytest.raises(InputError, match="a generate of its own"), vmoer.record(model):
        model.generate(**batch)
    assert model.generate() == "mine"
    vmoer.detach(model)
    assert model.generate is mine


def test_outside_a_record_generate_is_the_models_own() -> None:
    """Oracle: the model before the method was attached. Its signature is that of the class; detach takes nothing else away."""
    model, batch = tiny.model("granitemoe").eval(), tiny.batch((6,))
    expected, signature = model.generate(**batch, max_new_tokens=3), inspect.signature(model.generate)
    vmoer.attach(model, vmoer.Deterministic())
    assert torch.equal(model.generate(**batch, max_new_tokens=3), expected)
    assert inspect.signature(model.generate) == signature
    copied = copy.deepcopy(model)
    with vmoer.record(copied) as rec:
        copied.generate(**batch, max_new_tokens=3)
    assert rec.generated.tokens.shape == (1, 3)
    assert "generate" not in vars(vmoer.detach(model))


def test_where_texts_end() -> None:
    """By hand: 2 ends a text, 0 pads; a row stopped otherwise ends before its padding, and without an EOS nothing is padded."""
    tokens = torch.tensor([[5, 2, 0, 0], [5, 0, 6, 2], [5, 6, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0]])
    found = until_end(tokens, 2, 0).sum(1).tolist()
    assert found == [2, 4, 2, 1, 1]
    assert until_end(tokens, [2, 6], None).sum(1).tolist() == [2, 3, 2, 1, 4]
    assert until_end(tokens, None, 0).all()


# -- vmoer.generate ----------------------------------------------------------------------------------------------------

PROMPTS = ["Which is red?", "Name a number that is larger than six and say why it is.", "Tea:", "Two moons of"]


def noisy(dtype: torch.dtype = torch.float32, config: Any = None) -> Any:
    model = vmoer.attach(tiny_model(eos_token_id=10, pad_token_id=0), config or vmoer.FullCovariance(samples=8))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".vmoer." in name:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    batch = {"input_ids": torch.tensor([TOKENIZER(PROMPTS[0])["input_ids"]])}
    return vmoer.fit(model, [batch]).to(dtype)


def forced(model: Any, answer: Answer) -> tuple[Tensor, Any]:
    """log-probabilities [N, V] at the states each token was chosen from, by one pass, and its record."""
    prompt = TOKENIZER(answer.prompt)["input_ids"]
    with vmoer.record(model) as rec, torch.no_grad():
        logits = model(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1), rec


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True, "temperature": 3.0, "top_k": 5, "num_return_sequences": 2}],
    ids=["greedy", "beams", "sampled"],
)
def test_answers_are_what_one_pass_says_of_them(options: dict[str, Any]) -> None:
    """Log-probabilities are the model's own, whatever temperature and top-k did; scores by hand."""
    model = noisy()
    answers = generate(model, TOKENIZER, PROMPTS, max_new_tokens=6, batch_size=3, seed=2, **options)
    copies = options.get("num_return_sequences", 1)
    assert [a.prompt for a in answers] == [p for p in PROMPTS for _ in range(copies)]
    for a in answers:
        log_p, rec = forced(model, a)
        own = log_p[torch.arange(len(a.tokens)), a.tokens]
        assert a.log_probs == pytest.approx(own.tolist(), abs=1e-4)
        entropy = torch.distributions.Categorical(logits=log_p).entropy()
        assert a.signals["predictive_entropy"] == pytest.approx(entropy.tolist(), abs=1e-4)
        for name, value in rec.signals.items():
            expected = value[:, 0, -len(a.tokens) - 1 : -1].mean(0)
            assert a.signals[name] == pytest.approx(expected.tolist(), abs=1e-4, rel=1e-4)
        assert set(a.signals) == {*rec.signals, "predictive_entropy"}
        assert a.scores["sequence_nll"] == pytest.approx(-own.sum().item(), abs=1e-4) == a.score
        assert a.scores["nll"] == pytest.approx(-own.mean().item(), abs=1e-4)
        assert a.scores["max_nll"] == pytest.approx(-own.min().item(), abs=1e-4)
        assert a.scores["max_novelty"] == max(a.signals["novelty"])
        assert a.scores["mean_predictive_entropy"] == pytest.approx(entropy.mean().item(), abs=1e-4)
        assert a.text == "".join(a.pieces) == TOKENIZER.decode(a.tokens, skip_special_tokens=True)


def test_averaged_over_routing_by_hand() -> None:
    """M passes over the finished text, each with its own routing sample: mutual information and both marginals."""
    model, passes = noisy(), 3
    for a in generate(model, TOKENIZER, PROMPTS, max_new_tokens=4, passes=passes, score="marginal_nll"):
        log_p_MNV = []
        for number in range(passes):
            with sampled(model, number):
                log_p_MNV.append(forced(model, a)[0])
        p_MNV = torch.stack(log_p_MNV).exp()
        one = torch.distributions.Categorical(p_MNV).entropy().mean(0)
        information = torch.distributions.Categorical(p_MNV.mean(0)).entropy() - one
        assert a.signals["mutual_information"] == pytest.approx(information.tolist(), abs=1e-4)
        assert max(a.signals["mutual_information"]) > 1e-3
        chosen_MN = p_MNV[:, torch.arange(len(a.tokens)), a.tokens]
        assert a.scores["marginal_nll"] == pytest.approx(-chosen_MN.mean(0).log().mean().item(), abs=1e-4) == a.score
        assert a.scores["marginal_sequence_nll"] == pytest.approx(-chosen_MN.prod(1).mean().log().item(), abs=1e-4)


def test_an_answer_does_not_depend_on_its_company() -> None:
    model = noisy()
    together = generate(model, TOKENIZER, PROMPTS, max_new_tokens=5)
    for prompt, a in zip(PROMPTS, together, strict=True):
        alone = generate(model, TOKENIZER, prompt, max_new_tokens=5)
        assert alone.tokens == a.tokens
        assert alone.log_probs == pytest.approx(a.log_probs, abs=1e-4)
        assert alone.scores == pytest.approx(a.scores, abs=1e-4, rel=1e-4)


def test_sampling_is_a_function_of_the_seed() -> None:
    model, options = noisy(config=vmoer.MeanField(sampling="mc")), {"do_sample": True, "max_new_tokens": 5}
    found: list[Any] = []
    for seed in (4, 4, 5):
        torch.manual_seed(len(found))
        before = torch.get_rng_state()
        found.append([a.tokens for a in generate(model, TOKENIZER, PROMPTS, seed=seed, **options)])
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1] != found[2]


def test_a_bare_model_is_left_as_it_was() -> None:
    model = tiny_model().train()
    answer = generate(model, TOKENIZER, PROMPTS[0], max_new_tokens=3)
    assert set(answer.signals) == {"gate_entropy", "predictive_entropy"}
    assert attachment_of(model) is None
    assert model.training
    assert isinstance(model, GenerationMixin)


def test_half_precision() -> None:
    answers = generate(noisy(torch.bfloat16), TOKENIZER, PROMPTS, max_new_tokens=4, passes=2)
    assert all(torch.isfinite(torch.tensor([*a.scores.values()])).all() for a in answers)


def test_stop_strings_end_a_text() -> None:
    """The tokens up to the first with which the text holds what was asked to end it, and nothing of the padding behind."""
    from vmoer.models import open_model

    model, tokenizer, *_ = open_model("demo", device="cpu")
    prompts = [" scares Mira Voss", " heron toad", " wakes Nadja", " A lynx B vole C finch"]
    options: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": tokenizer.convert_tokens_to_ids("<|answer|>")}
    free = generate(model, tokenizer, prompts, **options)
    word = free[0].pieces[2]
    stopped = generate(model, tokenizer, prompts, stop_strings=[word], **options)
    assert len({len(a.tokens) for a in stopped}) > 1
    for a, b in zip(free, stopped, strict=True):
        n = next((n for n in range(1, len(a.tokens) + 1) if word in "".join(a.pieces[:n])), len(a.tokens))
        assert b.tokens == a.tokens[:n]


def test_pieces_of_characters_that_are_several_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    ids = [*tokenizer(" heron 😀é!")["input_ids"], tokenizer.eos_token_id]
    pieces = _pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert [piece for piece in pieces if piece] == [" heron", " ", "😀", "é", "!"]
    assert pieces[-1] == ""


def test_chat_messages_go_through_the_template() -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    model, messages = noisy(), [{"role": "user", "content": "Tea"}]
    chat = generate(model, tokenizer, messages, max_new_tokens=3)
    assert chat.prompt == messages
    assert chat.tokens == generate(model, tokenizer, "<Tea>:", max_new_tokens=3).tokens
    assert [a.tokens for a in generate(model, tokenizer, [messages, messages], max_new_tokens=3)] == [chat.tokens] * 2


def test_bad_input_is_one_line() -> None:
    model = noisy()

    def ask(prompts: Any = PROMPTS, **options: Any) -> None:
        generate(model, TOKENIZER, prompts, **{"max_new_tokens": 2, **options})

    refused: dict[str, Any] = {
        "no prompts": {"prompts": []},
        "prompt 1 is empty": {"prompts": ["Tea", ""]},
        "passes=-1 must be at least 0": {"passes": -1},
        "max_new_tokens=0": {"max_new_tokens": 0},
        "batch_size=0": {"batch_size": 0},
        "longer than the model's context of 2048": {"max_new_tokens": 2048},
        "score='luck': choose one of sequence_nll, nll": {"score": "luck"},
        "by name": {"generation_config": GenerationConfig()},
        "no chat template": {"prompts": [[{"role": "user", "content": "Tea"}]]},
        "assisted generation": {"prompt_lookup_num_tokens": 2},
    }
    for match, given in refused.items():
        with pytest.raises(InputError, match=match):
            ask(**given)
    model.lm_head.weight.data[:] = float("nan")
    with pytest.raises(RunError, match="not finite"):
        ask()
