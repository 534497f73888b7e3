"""DeepSeek-MoE-16B's layout, from the files as the hub has them to the command line.

Oracles: a forward pass in plain torch, written here; transformers' DeepSeek-OCR-2 text model, another implementation of the
same layers; the `tokenizers` library on the same file; the names of the tensors that were left out or added.
"""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub_server
import pytest
import tiny
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

import vmoer
from vmoer import deepseek
from vmoer.bench.geometries import GEOMETRIES
from vmoer.cli import run
from vmoer.errors import InputError
from vmoer.gates import find
from vmoer.models import open_model

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
WORDS = 300
CONFIG = tiny.DEEPSEEK_V1 | {"vocab_size": WORDS, "bos_token_id": 290, "eos_token_id": 291}
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\\n\\n' }}"
    "{% else %}{{ 'Assistant: ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
IDS = torch.tensor([[7, 60, 2, 33, 33, 250, 91, 18, 4], [299, 12, 0, 5, 77, 140, 201, 9, 9]])


def reference(config: dict[str, Any], tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits in float32, loop by loop: attention, a dense or a sparse feed-forward network, twice normalised."""
    w = {name: tensor.float() for name, tensor in tensors.items()}
    heads, size = config["num_attention_heads"], config["hidden_size"] // config["num_attention_heads"]
    groups = heads // config["num_key_value_heads"]
    angles = torch.outer(
        torch.arange(ids.shape[1]).float(), config["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
    )

    def norm(x: Tensor, name: str) -> Tensor:
        return w[f"{name}.weight"] * x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()

    def network(x: Tensor, name: str) -> Tensor:
        gate, up, down = (w[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def rotated(x: Tensor) -> Tensor:
        """Coordinates i and i + size / 2 are turned together."""
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def attention(x: Tensor, name: str) -> Tensor:
        length = len(x)
        q, k, v = ((x @ w[f"{name}.{part}_proj.weight"].T).view(length, -1, size).transpose(0, 1) for part in "qkv")
        k, v = rotated(k).repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = rotated(q) @ k.transpose(1, 2) / math.sqrt(size)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1) @ w[f"{name}.o_proj.weight"].T

    def sparse(x: Tensor, name: str) -> Tensor:
        rows = []
        for u in x:
            weights = (w[f"{name}.gate.weight"] @ u).softmax(-1)
            chosen = weights.argsort(descending=True)[: config["num_experts_per_tok"]].tolist()
            total = sum(weights[j] for j in chosen) if config["norm_topk_prob"] else 1.0
            routed = sum(weights[j] / total * network(u, f"{name}.experts.{j}") for j in chosen)
            rows.append(routed + network(u, f"{name}.shared_experts"))
        return torch.stack(rows)

    out = []
    for row in ids:
        x = w["model.embed_tokens.weight"][row]
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}"
            x = x + attention(norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
            u = norm(x, f"{layer}.post_attention_layernorm")
            x = x + (sparse if f"{layer}.mlp.gate.weight" in w else network)(u, f"{layer}.mlp")
        out.append(norm(x, "model.norm") @ w["lm_head.weight"].T)
    return torch.stack(out)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A folder as the hub has it: bfloat16 shards with an index, configuration, tokenizer, and code that must not run."""
    folder.mkdir(parents=True)
    names = list(tensors)
    cuts = [names[: len(names) // 3], names[len(names) // 3 : len(names) // 2], names[len(names) // 2 :]]
    weight_map: dict[str, str] = {}
    for number, part in enumerate(cuts, 1):
        file = f"model-{number:05}-of-{len(cuts):05}.safetensors"
        save_file({name: tensors[name].bfloat16().contiguous() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(2 * tensor.numel() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    generation = {"_from_model_config": True, "bos_token_id": 290, "eos_token_id": 291, "pad_token_id": 291}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    for name in ("configuration_deepseek", "modeling_deepseek"):
        (folder / f"{name}.py").write_text("raise SystemExit('remote code was run')\n")
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Bytes and a few words, with the kind of splitting and the configuration that the hub's has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", letter) for letter in "ABCDE"]
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    split = pre_tokenizers.Split(Regex(r"[\r\n]|\s?\p{L}+|\s?\p{P}+"), behavior="isolated")
    parts = [split, pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    filler = [f"<{i}>" for i in range(len(vocabulary), 290)]
    tokenizer.add_tokens(filler)
    tokenizer.add_special_tokens([AddedToken(BEGIN, normalized=True), AddedToken(END, normalized=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    config = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": special | {"content": BEGIN},
        "clean_up_tokenization_spaces": False,
        "eos_token": special | {"content": END},
        "legacy": True,
        "model_max_length": 4096,
        "pad_token": special | {"content": END},
        "sp_model_kwargs": {},
        "unk_token": None,
        "tokenizer_class": "LlamaTokenizerFast",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def read(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hub") / "tiny", CONFIG, tiny.deepseek_tensors(CONFIG))


@pytest.fixture(scope="module")
def quiz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "quiz.jsonl"
    rows = [
        {"id": f"q{i}", "question": f"Is {i} even?", "choices": ["yes", "no"], "answer": i % 2, "split": split}
        for i, split in enumerate(["train"] * 12 + ["validation"] * 4 + ["test"] * 4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 5, "moe_layer_freq": 2, "num_key_value_heads": 2, "n_shared_experts": 3},
        {"norm_topk_prob": True, "first_k_dense_replace": 0, "rope_theta": 500, "rms_norm_eps": 0.01},
    ],
)
def test_the_logits_are_those_of_a_forward_pass_written_by_hand(changes: dict[str, Any], tmp_path: Path) -> None:
    config = CONFIG | changes
    folder = write(tmp_path / "hub", config, tiny.deepseek_tensors(config))
    opened = open_model(folder, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        ours = opened.model(input_ids=IDS).logits
    theirs = reference(config, read(folder), IDS)
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_another_implementation_of_the_layers_agrees(folder: Path) -> None:
    """transformers' DeepSeek-OCR-2 has a text model of this layout, without a head."""
    modelling = pytest.importorskip("transformers.models.deepseek_ocr2.modeling_deepseek_ocr2")
    same = {name: CONFIG[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size")}
    same |= {name: CONFIG[name] for name in ("num_hidden_layers", "num_attention_heads", "num_experts_per_tok")}
    config = modelling.DeepseekOcr2TextConfig(
        **same,
        n_routed_experts=CONFIG["n_routed_experts"],
        n_shared_experts=CONFIG["n_shared_experts"],
        mlp_layer_types=["dense", "sparse", "sparse"],
    )
    model, state = modelling.DeepseekOcr2TextModel(config).eval(), {}
    tensors = {name: tensor.float() for name, tensor in read(folder).items()}
    for name in model.state_dict():
        path, part = f"model.{name}".rsplit(".", 1)
        if path.endswith(".experts"):
            experts = [
                torch.cat([tensors[f"{path}.{j}.{one}_proj.weight"] for one in part.removesuffix("_proj").split("_")])
                for j in range(CONFIG["n_routed_experts"])
            ]
            state[name] = torch.stack(experts)
        else:
            state[name] = tensors[f"model.{name}"]
    model.load_state_dict(state)
    opened = open_model(folder, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        theirs = model(input_ids=IDS).last_hidden_state @ tensors["lm_head.weight"].T
        torch.testing.assert_close(opened.model(input_ids=IDS).logits, theirs, atol=1e-5, rtol=0)


def test_the_shared_experts_are_exact_in_bfloat16(folder: Path) -> None:
    """Oracle: the plain network on the checkpoint's own weights, bit for bit."""
    model = open_model(folder, device="cpu", dtype=torch.bfloat16).model
    u = torch.randn(40, CONFIG["hidden_size"], generator=torch.Generator().manual_seed(3)).bfloat16()
    gate, up, down = (
        read(folder)[f"model.layers.1.mlp.shared_experts.{p}_proj.weight"] for p in ("gate", "up", "down")
    )
    block = model.model.layers[1].mlp
    with torch.no_grad():
        ours = torch.sigmoid(block.shared_expert_gate(u)) * block.shared_expert(u)
    assert torch.equal(ours, F.linear(F.silu(F.linear(u, gate)) * F.linear(u, up), down))
    assert not block.shared_expert_gate.weight.requires_grad


def test_the_benchmark_has_the_published_model() -> None:
    """Oracle: what its authors say of it: 16.4 billion parameters, 28 layers, the first of them dense, 64 experts, six chosen."""
    geometry = GEOMETRIES["deepseek-moe-16b"]
    config = geometry.configuration()
    assert round(sum(math.prod(shape) for shape in deepseek.shapes(config).values()) / 1e9, 1) == 16.4
    model = geometry.build("meta", torch.bfloat16)
    found = find(model)
    assert type(model) is type(tiny.model("deepseek_v1"))
    assert [one.layer for one in found] == list(range(1, 28))
    routers: list[Any] = [one.router for one in found]
    assert {(router.num_experts, router.top_k) for router in routers} == {(64, 6)}
    assert 0 not in geometry.layers()
    assert len(geometry.layers()) == 10


# -- what is refused ---------------------------------------------------------------------------------------------------

EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def with_one(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


DAMAGE: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "an expert": (without(EXPERT), f"lacks {EXPERT}"),
    "a router": (without("model.layers.2.mlp.gate.weight"), "lacks model.layers.2.mlp.gate.weight"),
    "a shared expert": (
        without("model.layers.1.mlp.shared_experts.down_proj.weight"),
        "lacks model.layers.1.mlp.shared_experts.down_proj.weight",
    ),
    "the head": (without("lm_head.weight"), "lacks lm_head.weight"),
    "one expert too many": (
        with_one("model.layers.1.mlp.experts.8.up_proj.weight", torch.zeros(16, 32)),
        "extra tensor model.layers.1.mlp.experts.8.up_proj.weight",
    ),
    "a gate on the shared experts": (
        with_one("model.layers.1.mlp.shared_expert_gate.weight", torch.zeros(1, 32)),
        "extra tensor model.layers.1.mlp.shared_expert_gate.weight",
    ),
    "a bias": (
        with_one("model.layers.0.self_attn.q_proj.bias", torch.zeros(32)),
        "extra tensor model.layers.0.self_attn.q_proj.bias",
    ),
    "another shape": (with_one(EXPERT, torch.zeros(32, 16)), f"{EXPERT} has shape [32, 16]"),
    "other frequencies": (
        with_one("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4)),
        "inv_freq is not what rope_theta = 10000 gives",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_checkpoint_that_is_not_whole_is_refused_by_name(what: str, tmp_path: Path) -> None:
    damage, said = DAMAGE[what]
    tensors = tiny.deepseek_tensors(CONFIG)
    damage(tensors)
    with pytest.raises(InputError) as error:
        open_model(write(tmp_path / "hub", CONFIG, tensors), device="cpu")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in tiny.deepseek_tensors(CONFIG).items() if ".experts." not in name}
    with pytest.raises(InputError, match=r"lacks model\.layers\.1\.mlp\.experts\.0\.gate_proj\.weight, and 47 more$"):
        open_model(write(tmp_path / "hub", CONFIG, tensors), device="cpu")


def test_frequencies_of_old_checkpoints_are_checked_and_left_out(folder: Path, tmp_path: Path) -> None:
    """Oracle: the formula, at base 10000 and eight coordinates a head."""
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001])
    tensors = tiny.deepseek_tensors(CONFIG) | {"model.layers.2.self_attn.rotary_emb.inv_freq": frequencies}
    old = open_model(write(tmp_path / "hub", CONFIG, tensors), device="cpu")
    new = open_model(folder, device="cpu")
    with torch.no_grad():
        assert torch.equal(old.model(input_ids=IDS).logits, new.model(input_ids=IDS).logits)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' cannot be opened: only 'softmax' can"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"n_shared_experts": None}, "no number 'n_shared_experts'"),
    ],
)
def test_settings_of_the_layout_that_have_no_counterpart(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "hub", CONFIG | changes, tiny.deepseek_tensors(CONFIG))
    with pytest.raises(InputError, match="cannot load the model") as error:
        open_model(folder, device="cpu")
    assert said in str(error.value)


def test_files_that_are_not_there_or_damaged(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model-00002-of-00003.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match=r"model-00002-of-00003.safetensors cannot be read"):
        open_model(broken, device="cpu")
    (broken / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match=r"there is no model-00002-of-00003.safetensors"):
        open_model(broken, device="cpu")


def written(name: str, content: object) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(json.dumps(content))


def configured(**changes: object) -> Callable[[Path], object]:
    return written("config.json", CONFIG | changes)


def indexed(weight_map: object) -> Callable[[Path], object]:
    return written("model.safetensors.index.json", {"weight_map": weight_map})


def shard(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    """The second shard with other tensors in it."""

    def damage(folder: Path) -> None:
        path = folder / "model-00002-of-00003.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


def eight_bits(tensors: dict[str, Tensor]) -> None:
    tensors.update({name: tensor.to(torch.int8) for name, tensor in tensors.items()})


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no map of weights": (written("model.safetensors.index.json", {}), "has no weight_map"),
    "an index that is a list": (written("model.safetensors.index.json", []), "index.json is not a JSON object"),
    "a map that is a list": (indexed(["model.safetensors"]), "has no weight_map"),
    "a map to numbers": (indexed({EXPERT: 1}), "has no weight_map"),
    "a map to nothing": (indexed({EXPERT: ""}), "names '', which is not a file beside it"),
    "an index that is no JSON": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
        "model.safetensors.index.json: not valid JSON",
    ),
    "rope_theta null": (configured(rope_theta=None), "rope_theta = None, which must be a positive number"),
    "rope_theta 0": (configured(rope_theta=0), "rope_theta = 0, which must be a positive number"),
    "no layer has experts": (configured(moe_layer_freq=0), "moe_layer_freq = 0, which must be a whole number"),
    "dense layers null": (configured(first_k_dense_replace=None), "first_k_dense_replace = None"),
    "no heads": (configured(num_attention_heads=0), "num_attention_heads = 0, which must be at least 1"),
    "heads that do not divide": (configured(num_attention_heads=5), "num_attention_heads = 5, which must be a divisor"),
    "no key heads": (configured(num_key_value_heads=0), "num_key_value_heads = 0, which must be a whole number"),
    "key heads that do not divide": (configured(num_key_value_heads=3), "num_key_value_heads = 3, which must be a div"),
    "a truth for a size": (configured(num_hidden_layers=True), "has no number 'num_hidden_layers'"),
    "an unknown activation": (configured(hidden_act="swosh"), "hidden_act = 'swosh', which must be an activation"),
    "an activation that is a list": (configured(hidden_act=["silu"]), "hidden_act = ['silu'], which must be"),
    "a norm's epsilon in words": (configured(rms_norm_eps="small"), "config.json cannot be read"),
    "more experts a token than there are": (
        configured(num_experts_per_tok=99),
        "num_experts_per_tok = 99, which must be at most n_routed_experts = 8",
    ),
    "a tokenizer's settings as a list": (written("tokenizer_config.json", []), "tokenizer_config.json is not a JSON"),
    "generation settings as a list": (written("generation_config.json", []), "generation_config.json is not a JSON"),
    "an empty tokenizer": (written("tokenizer.json", {}), "tokenizer.json cannot be read"),
    "one tensor in two files": (
        shard(with_one("model.embed_tokens.weight", torch.zeros(WORDS, 32))),
        "model-00002-of-00003.safetensors has model.embed_tokens.weight, which another file",
    ),
    "weights of eight bits": (shard(eight_bits), "is of int8: only weights in floating point"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_damaged_folder_is_one_line(
    what: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the file or the setting that was damaged here. The command says the same, with the code of a wrong input."""
    damage, said = BROKEN[what]
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    damage(broken)
    with pytest.raises(InputError, match="cannot load the model") as error:
        open_model(broken, device="cpu")
    assert said in str(error.value)
    assert run(["ask", str(broken), "Is 42 even?"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def test_the_tokenizer_is_the_repositorys(folder: Path) -> None:
    """Oracle: the `tokenizers` library on the same file, the first token of `add_bos_token` before it; the template by hand."""
    tokenizer = open_model(folder, device="cpu").tokenizer
    for text in ("Is 42 even?\nA B  C", "naïve — 漢字\t\n", "Answer: E"):
        expected = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
        assert tokenizer(text).input_ids == [290, *expected]
        assert tokenizer.decode(expected) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (BEGIN, END, END)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why?"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "User: Why?\n\nAssistant:"


# -- there and back, and the commands ----------------------------------------------------------------------------------

PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
model, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, output_loading_info=True)
assert not any(info.values()), info
assert not any(name.startswith("vmoer") for name in sys.modules)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
torch.save((model(input_ids=torch.load(sys.argv[2])).logits.detach(), tokenizer("Is 42 even?").input_ids), sys.argv[3])
"""


def test_what_is_saved_opens_in_plain_transformers(folder: Path, tmp_path: Path) -> None:
    """Oracle: the same pass before saving; a process that never imports vmoer, and nothing but safetensors and JSON on disk."""
    opened = open_model(folder, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        before = opened.model(input_ids=IDS).logits
    vmoer.attach(opened.model, vmoer.MeanField())
    vmoer.save(opened.model, tmp_path / "routers")
    opened.model.save_pretrained(tmp_path / "saved")
    opened.tokenizer.save_pretrained(tmp_path / "saved")
    assert {path.suffix for path in (tmp_path / "saved").iterdir()} <= {".json", ".safetensors", ".jinja"}
    torch.save(IDS, tmp_path / "ids.pt")
    arguments = [str(tmp_path / name) for name in ("saved", "ids.pt", "out.pt")]
    subprocess.run([sys.executable, "-c", PLAIN, *arguments], check=True, env={"HF_HUB_OFFLINE": "1"})
    logits, ids = torch.load(tmp_path / "out.pt")
    assert torch.equal(logits, before)
    assert ids == opened.tokenizer("Is 42 even?").input_ids

    again = open_model(tmp_path / "saved", device="cpu", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again.model(input_ids=IDS).logits, before)
        vmoer.load(again.model, tmp_path / "routers")  # trained on the one, at home on the other
        assert torch.equal(again.model(input_ids=IDS).logits, opened.model(input_ids=IDS).logits)


def test_it_opens_from_hub_by_name(folder: Path, hub: hub_server.Hub) -> None:
    """Oracle: the local folder; what was asked of the server: no code."""
    name = "deepseek-ai/deepseek-moe-16b-base"
    hub.create(name)
    hub.commit(name, "main", {path.name: path.read_bytes() for path in folder.iterdir()})
    opened, local = (open_model(place, device="cpu") for place in (name, folder))
    with torch.no_grad():
        assert torch.equal(opened.model(input_ids=IDS).logits, local.model(input_ids=IDS).logits)
    assert opened.tokenizer("Is 42 even?").input_ids == local.tokenizer("Is 42 even?").input_ids
    assert opened.model.config._name_or_path == opened.name == name
    asked = {line.split("?")[0].rpartition("/")[2] for line in hub.log if "/resolve/" in line}
    assert {"config.json", "model-00003-of-00003.safetensors", "tokenizer.json"} <= asked
    assert not [file for file in asked if file.endswith(".py")]


def test_generation_settings_come_along(folder: Path) -> None:
    model = open_model(folder, device="cpu").model
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (291, 291)
    assert model.generate(IDS, max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (2, 12)


def test_info_reads_the_configuration_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the numbers in config.json; the folder has no weights."""
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(folder / "config.json", bare)
    assert run(["info", str(bare), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["layer"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["experts"], row["top_k"], row["score"]) == (8, 3, "softmax")
        assert (row["normalise"], row["reason"]) == (False, None)


def test_train_and_eval(folder: Path, quiz: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the run names the folder and its layers; a prediction for each of the four test questions."""
    short = ["--stage1-epochs", "1", "--stage2-epochs", "1", "--batch-size", "4", "--rank", "2"]
    command = ["train", folder, "--task", quiz, "--out", tmp_path / "run", "--method", "vglr-mf", *short]
    assert run([str(a) for a in command]) == 0
    said = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (said["model"], said["method"]) == (str(folder), "vglr-mf")
    assert json.loads((tmp_path / "run" / "router.json").read_text())["config"]["layers"] == [1, 2]
    capsys.readouterr()
    assert run([str(a) for a in ("eval", tmp_path / "run", "--task", quiz, "--out", tmp_path / "eval", "--json")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"accuracy", "nll"} <= {row["metric"] for row in rows}
    assert (tmp_path / "eval" / "predictions.parquet").exists()
