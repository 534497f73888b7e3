"""Router files: what is written comes back, and whatever does not fit is refused with the model unchanged."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

import vmoer
from vmoer.errors import InputError
from vmoer.files import sealed, write_text
from vmoer.models import open_model, skeleton
from vmoer.saved import adapter, manifest, store
from vmoer.training.lora import add_lora


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model = tiny.model("granitemoe")
    vmoer.attach(model, vmoer.FullCovariance(layers=[1], beta=0.3))
    return vmoer.save(model, tmp_path / "run")


def snapshot(model: Any) -> list[Any]:
    """Everything a failed load could leave behind: modules, their classes and hooks, values, requires_grad, attributes."""
    out: list[Any] = []
    for name, module in model.named_modules():
        hooks = [len(vars(module)[kind]) for kind in sorted(vars(module)) if kind.endswith("_hooks")]
        out.append((name, id(module), type(module), sorted(vars(module)), hooks, module.training))
    return [
        *out,
        *((name, id(p), p.requires_grad, p.detach().clone().numpy().tobytes()) for name, p in model.named_parameters()),
    ]


def refused(folder: Path, message: str, model: Any = None) -> None:
    model = tiny.model("granitemoe") if model is None else model
    before = snapshot(model)
    with pytest.raises(InputError, match=message) as caught:
        vmoer.load(model, folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert before == snapshot(model)


def lora(seed: int) -> Any:
    model = get_peft_model(tiny.model("granitemoe"), LoraConfig(target_modules=["q_proj"], r=2))
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape, generator=generator)
    return model


def test_configuration_comes_back(run: Path) -> None:
    model = vmoer.load(tiny.model("granitemoe"), run)
    from vmoer.live.attach import attached

    assert attached(model).config == vmoer.FullCovariance(layers=[1], beta=0.3)
    assert sorted(p.name for p in run.iterdir()) == ["README.md", "manifest.json", "router.json", "router.safetensors"]


def test_novelty_comes_back(tmp_path: Path) -> None:
    model, batch = tiny.model("granitemoe"), tiny.batch()
    vmoer.attach(model, vmoer.VariationalTemperature())
    vmoer.fit(model, [batch], rank=5)
    vmoer.save(model, tmp_path)
    again = vmoer.load(tiny.model("granitemoe"), tmp_path)
    signals = []
    for m in (model, again):
        with vmoer.record(m) as rec, torch.no_grad():
            m(**batch)
        signals.append(rec.signals["novelty"])
    assert torch.equal(*signals)


def test_a_cast_base_model_is_the_same_base_model(run: Path) -> None:
    vmoer.load(tiny.model("granitemoe", torch.bfloat16), run)


def test_another_base_model(run: Path) -> None:
    other = tiny.model("granitemoe")
    other.model.layers[1].block_sparse_moe.router.weight.data.add_(0.1)
    refused(run, "trained on another base model", other)
    refused(run, "trained on another base model", tiny.model("mixtral"))


def test_truncated_and_tampered_files(run: Path) -> None:
    path = run / "router.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    refused(run, "truncated or was changed")
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(run, "truncated or was changed")
    path.unlink()
    refused(run, r"no router\.safetensors, which its manifest lists")


def test_a_hash_of_each_router_that_knows_no_names(run: Path) -> None:
    """Oracle: bfloat16 by hand, the upper half of a float32 rounded to even; and no layer that is not attached."""
    bits = tiny.model("granitemoe").model.layers[1].block_sparse_moe.router.weight.detach().numpy().view(np.uint32)
    upper = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    good = json.loads((run / "router.json").read_text())
    assert good["router_hashes"] == {"1": hashlib.sha256(upper.tobytes()).hexdigest()}
    for wrong in ({}, {"1": "0" * 64}, {"0": good["router_hashes"]["1"]}, {"1": 3}):
        changed(run, "router.json", {**good, "router_hashes": wrong})
        refused(run, "router_hashes of router.json are not those")


def test_folders_of_an_earlier_format_say_what_renews_them(run: Path) -> None:
    content = {
        name: value for name, value in json.loads((run / "manifest.json").read_text()).items() if name == "files"
    }
    for old, message in ((2, r"earlier version wrote it; train again, then vmoer\.save"), (9, "later version may")):
        write_text(run / "manifest.json", json.dumps(sealed({"format": old, **content}), indent=1) + "\n")
        refused(run, message)
    (run / "run.json").write_text("{}")
    write_text(run / "manifest.json", json.dumps(sealed({"format": 2, **content}), indent=1) + "\n")
    refused(run, "remove the folder and run the vmoer train command that wrote it again")


def changed(run: Path, name: str, content: Any) -> None:
    """As somebody would who writes a folder of their own: the manifest is right, the content is not."""
    (run / name).write_text(content if isinstance(content, str) else json.dumps(content))
    manifest.seal(run)


def test_broken_descriptions(run: Path) -> None:
    good = json.loads((run / "router.json").read_text())
    for content, message in (
        ("{", "not valid"),
        ("[" * 100_000, "nested too deeply"),
        ('{"format": ' + "9" * 5000 + "}", "too many digits"),
        ("[]", "not a JSON object"),
        ({**good, "format": 1}, "format 1"),
        ({k: v for k, v in good.items() if k != "base"}, "lacks base"),
        ({**good, "base": None}, "base is not what vmoer writes"),
        ({**good, "router_hashes": [1]}, "router_hashes is not what vmoer writes"),
        ({**good, "config": {**good["config"], "method": "vglr-xx"}}, "unknown method"),
        ({**good, "config": {**good["config"], "colour": "red"}}, "does not know"),
        ({**good, "config": {**good["config"], "method": "vglr-mf"}}, "does not fit its configuration|has shape"),
    ):
        changed(run, "router.json", content)
        refused(run, message)
    changed(run, "router.json", good)
    vmoer.load(tiny.model("granitemoe"), run)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("samples", 10**7),
        ("samples", 1.5),
        ("samples", True),
        ("seed", -1),
        ("seed", 2**70),
        ("prior_scale", float("inf")),
        ("prior_scale", "1"),
        ("beta", float("nan")),
        ("layers", [0.9]),
        ("layers", [-1]),
        ("layers", 1),
        ("layers", [10**9]),
    ],
)
def test_settings_out_of_bounds(run: Path, name: str, value: Any) -> None:
    good = json.loads((run / "router.json").read_text())
    changed(run, "router.json", {**good, "config": {**good["config"], name: value}})
    refused(run, f"{name}|NaN|Infinity")


def test_every_changed_or_missing_file_is_named(run: Path) -> None:
    for name in ("router.json", "router.safetensors", "manifest.json"):
        whole = (run / name).read_bytes()
        for broken in (whole[:-3], whole[:-2] + bytes([whole[-2] ^ 2]) + whole[-1:], b""):
            (run / name).write_bytes(broken)
            refused(run, name)
        (run / name).write_bytes(whole)
    (run / "adapter_config.json").write_text("{}")
    refused(run, r"adapter_config\.json is not in the folder's manifest")
    (run / "adapter_config.json").unlink()
    (run / "manifest.json").unlink()
    refused(run, r"no manifest\.json: an earlier version of vmoer wrote it; .*vmoer\.save")
    (run / "run.json").write_text("{}")
    refused(run, "run the vmoer train command that wrote it again")


def test_only_plain_files_are_read(run: Path, tmp_path: Path) -> None:
    """A pipe would be waited for, a device has no end, and a link may lead anywhere."""
    whole = (run / "router.json").read_bytes()
    outside = tmp_path / "router.json"
    outside.write_bytes(whole)
    (run / "router.json").unlink()
    (run / "router.json").symlink_to(outside)
    refused(run, "leads out of its folder")
    (run / "router.json").unlink()
    (run / "router.json").symlink_to("/dev/zero")
    refused(run, "leads out of its folder")
    (run / "router.json").unlink()
    os.mkfifo(run / "router.json")
    refused(run, "is not a plain file")
    (run / "router.json").unlink()
    (run / "inside.json").write_bytes(whole)
    (run / "router.json").symlink_to("inside.json")
    vmoer.load(tiny.model("granitemoe"), run)
    with (run / "router.safetensors").open("r+b") as file:
        file.truncate(2**40)  # a file of a terabyte that takes no room
    refused(run, "has 1099511627776 bytes, and at most")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300, 1e30])
def test_only_finite_tensors(run: Path, value: float) -> None:
    tensors = load_file(run / "router.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.numel() > 1)
    tensors[name] = tensors[name].double()
    tensors[name].view(-1)[0] = value
    save_file(tensors, run / "router.safetensors")
    manifest.seal(run)
    refused(run, "not finite numbers")


@pytest.mark.parametrize("shape", [(3,), (3, 5), (33, 32), (2, 2, 32)])
def test_novelty_has_as_many_columns_as_the_model(run: Path, shape: tuple[int, ...]) -> None:
    tensors = load_file(run / "router.safetensors")
    tensors["1.novelty_root_RD"] = torch.zeros(shape)
    save_file(tensors, run / "router.safetensors")
    manifest.seal(run)
    refused(run, "has shape")


@pytest.fixture
def adapted(tmp_path: Path) -> Path:
    return vmoer.save(vmoer.attach(lora(1), vmoer.MeanField()), tmp_path / "adapted", run={"model": "x"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("r", 10**7),
        ("r", 0),
        ("r", 2.0),
        ("r", 4),
        ("lora_alpha", 16),
        ("lora_alpha", -8),
        ("lora_dropout", 1.0),
        ("use_rslora", True),
        ("use_dora", True),
        ("alpha_pattern", {"q_proj": 1}),
        ("rank_pattern", {"q_proj": 3}),
        ("modules_to_save", ["lm_head"]),
        ("target_modules", "(a+)+$"),
        ("target_modules", ["(a+)+$"]),
        ("target_modules", ["q_proj", "v_proj"]),
        ("target_modules", []),
        ("target_parameters", ["x" * 1000]),
        ("layer_replication", [[0, 2]] * 10**5),
        ("init_lora_weights", "pissa"),
        ("colour", "red"),
        ("bias", "all"),
        ("eva_config", {}),
        ("auto_mapping", {"base_model_class": "os.system"}),
    ],
)
def test_an_adapter_is_a_plain_lora_or_refused(adapted: Path, name: str, value: Any) -> None:
    """With a right manifest. What says nothing about the weights is not read: then the logits are those of before."""
    good, batch = json.loads((adapted / "adapter_config.json").read_text()), tiny.batch()
    with torch.no_grad():
        expected = vmoer.load(tiny.model("granitemoe"), adapted).eval()(**batch).logits
    changed(adapted, "adapter_config.json", {**good, name: value})
    if name in ("init_lora_weights", "auto_mapping"):
        with torch.no_grad():
            assert torch.equal(vmoer.load(tiny.model("granitemoe"), adapted).eval()(**batch).logits, expected)
        return
    model = tiny.model("granitemoe")
    refused(adapted, "adapter", model)
    changed(adapted, "adapter_config.json", good)
    with torch.no_grad():
        assert torch.equal(vmoer.load(model, adapted).eval()(**batch).logits, expected)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.lm_head.weight",
        "base_model.model.model.norm.weight",
        "base_model.model.model.layers.0.block_sparse_moe.router.weight",
        "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.other.weight",
    ],
)
def test_an_adapter_brings_lora_weights_alone(adapted: Path, name: str) -> None:
    tensors = load_file(adapted / "adapter_model.safetensors")
    save_file({**tensors, name: torch.ones(2, 32)}, adapted / "adapter_model.safetensors")
    manifest.seal(adapted)
    refused(adapted, "adapter_model")


def test_routers_that_say_nothing_of_the_adapter_beside_them(adapted: Path) -> None:
    good = json.loads((adapted / "router.json").read_text())
    changed(adapted, "router.json", {**good, "adapter": None})
    refused(adapted, "has an adapter, and its router.json says that there is none")


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_an_adapter_is_written_as_peft_writes_it_and_nowhere_else(
    task: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: PEFT's own files; the settings by value, since a set has no order."""
    config = LoraConfig(target_modules=["v_proj", "q_proj"], r=2, task_type=task)
    model = get_peft_model(tiny.model("granitemoe"), config)
    model.save_pretrained(tmp_path / "theirs")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    vmoer.save(vmoer.attach(model, vmoer.MeanField()), tmp_path / "ours")
    theirs, ours = (tmp_path / name for name in ("theirs", "ours"))
    assert (ours / "adapter_model.safetensors").read_bytes() == (theirs / "adapter_model.safetensors").read_bytes()
    told, said = (json.loads((folder / "adapter_config.json").read_text()) for folder in (theirs, ours))
    assert said == told | {"target_modules": ["q_proj", "v_proj"]}


def test_an_adapter_that_would_not_be_read_again_is_not_saved(tmp_path: Path) -> None:
    config = LoraConfig(target_modules=["q_proj"], r=2, use_dora=True)
    model = vmoer.attach(get_peft_model(tiny.model("granitemoe"), config), vmoer.MeanField())
    with pytest.raises(InputError, match=r"only a plain LoRA adapter can be saved: .*use_dora"):
        vmoer.save(model, tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def test_a_base_model_brings_no_code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask on a terminal, and run it on a yes."""

    def asked(*args: Any) -> str:
        raise AssertionError("somebody was asked")

    monkeypatch.setattr("builtins.input", asked)
    ran = tmp_path / "ran"
    for name in ("configuration_evil.py", "modeling_evil.py"):
        (tmp_path / name).write_text(f"open({str(ran)!r}, 'w')\n")
    kinds = {"AutoConfig": "configuration_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": kinds}))
    with pytest.raises(InputError, match="cannot load the model") as caught:
        open_model(tmp_path)
    with pytest.raises(InputError, match="cannot load the model"):
        skeleton(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert not ran.exists()


def test_pickles_are_never_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "router.pt")
    refused(tmp_path, "pickle, and only safetensors are read")
    refused(tmp_path / "nowhere", "not a folder")


def test_router_over_an_adapter(tmp_path: Path) -> None:
    """The run brings its adapter along; without it, or with another, the routers are refused."""
    model, batch = lora(1), tiny.batch()
    vmoer.attach(model, vmoer.MeanField())
    vmoer.save(model, tmp_path)
    model.eval()
    with torch.no_grad():
        expected = model(**batch).logits
        loaded = vmoer.load(tiny.model("granitemoe"), tmp_path).eval()
        assert torch.equal(loaded(**batch).logits, expected)
        assert torch.equal(vmoer.load(lora(1), tmp_path).eval()(**batch).logits, expected)
    refused(tmp_path, "another adapter", lora(2))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).unlink()
    refused(tmp_path, "which its manifest lists")
    manifest.seal(tmp_path)
    refused(tmp_path, "trained over a LoRA adapter, and this model has no adapter")


def test_an_adapter_without_peft_says_what_to_install(
    adapted: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading one, putting one on and writing one; routers that have none need no PEFT."""
    read, model, plain = store.read_folder(adapted).adapter, lora(1), tiny.model("granitemoe")
    assert read is not None
    monkeypatch.setitem(sys.modules, "peft", None)
    says = r"^LoRA adapters need peft: pip install 'vmoer\[train\]'$"
    for work in (
        lambda: store.read_folder(adapted),
        lambda: adapter.put_on(plain, read, adapted),
        lambda: vmoer.save(vmoer.attach(model, vmoer.MeanField()), tmp_path / "again"),
        lambda: add_lora(tiny.model("granitemoe")),
    ):
        with pytest.raises(InputError, match=says):
            work()
    refused(adapted, says)
    vmoer.load(tiny.model("granitemoe"), run)


def test_router_without_an_adapter_on_an_adapted_model(run: Path) -> None:
    refused(run, "trained without an adapter, and this model has another adapter", lora(1))


def test_saving_is_atomic(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up half-way leaves the old files as they were."""
    before = {p.name: p.read_bytes() for p in run.iterdir()}
    model = vmoer.load(tiny.model("granitemoe"), run)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        vmoer.save(model, run)
    assert {p.name: p.read_bytes() for p in run.iterdir()} == before


def test_weights_from_which_nothing_finite_comes(run: Path) -> None:
    """Each of them is a finite number of a size that is allowed; the exponential of what they give is not."""
    tensors = load_file(run / "router.safetensors")
    save_file({name: torch.full_like(tensor, 1e5) for name, tensor in tensors.items()}, run / "router.safetensors")
    manifest.seal(run)
    refused(run, r"the routing of model\.layers\.1\..* is not finite with these weights")
