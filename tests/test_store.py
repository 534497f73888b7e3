"""Router files: what is written comes back, and whatever does not fit is refused with the model unchanged."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model

import vmoer
from vmoer.errors import InputError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model = tiny.model("granitemoe")
    vmoer.attach(model, vmoer.FullCovariance(layers=[1], beta=0.3))
    return vmoer.save(model, tmp_path / "run")


def refused(folder: Path, message: str, model: Any = None) -> None:
    model = tiny.model("granitemoe") if model is None else model
    before = (
        [type(m) for m in model.modules()],
        list(model.state_dict()),
        [p.requires_grad for p in model.parameters()],
    )
    with pytest.raises(InputError, match=message) as caught:
        vmoer.load(model, folder)
    assert "\n" not in str(caught.value)
    assert before == (
        [type(m) for m in model.modules()],
        list(model.state_dict()),
        [p.requires_grad for p in model.parameters()],
    )


def lora(seed: int) -> Any:
    model = get_peft_model(tiny.model("granitemoe"), LoraConfig(target_modules=["q_proj"], r=2))
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape, generator=generator)
    return model


def test_configuration_comes_back(run: Path) -> None:
    model = vmoer.load(tiny.model("granitemoe"), run)
    from vmoer.attach import attached

    assert attached(model).config == vmoer.FullCovariance(layers=[1], beta=0.3)
    assert sorted(p.name for p in run.iterdir()) == ["README.md", "router.json", "router.safetensors"]


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
    refused(run, r"no router\.safetensors")


def test_broken_descriptions(run: Path) -> None:
    path = run / "router.json"
    good = json.loads(path.read_text())
    path.write_text("{")
    refused(run, "not valid")
    path.write_text(json.dumps({**good, "format": 99}))
    refused(run, "format 99")
    path.write_text(json.dumps({k: v for k, v in good.items() if k != "base"}))
    refused(run, "lacks base")
    path.write_text(json.dumps({**good, "config": {**good["config"], "method": "vglr-xx"}}))
    refused(run, "unknown method")
    path.write_text(json.dumps({**good, "config": {**good["config"], "colour": "red"}}))
    refused(run, "does not know")
    path.write_text(json.dumps({**good, "config": {**good["config"], "method": "vglr-mf"}}))
    refused(run, "does not fit its configuration|has shape")


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
    (tmp_path / "adapter_config.json").unlink()
    refused(tmp_path, "trained over a LoRA adapter, and this model has no adapter")


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
