"""The hub, against a server that speaks its interface: the client is `huggingface_hub` itself, the oracle the local folder."""

import json
from pathlib import Path
from typing import Any

import hub_server
import pytest
import tiny
import torch
from huggingface_hub import ModelCard, constants

import vmoer
from vmoer.errors import InputError, RunError
from vmoer.files import write_json
from vmoer.models import open_model
from vmoer.saved.hub import push_to_hub

BASE = "org/base"


def attached(**settings: Any) -> Any:
    model = tiny.model("granitemoe")
    model.config._name_or_path = BASE
    vmoer.attach(model, vmoer.FullCovariance(layers=[1], **settings))
    generator = torch.Generator().manual_seed(int(100 * settings.get("beta", 0.01)))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**tiny.batch()).logits


def publish(source: Any, repo: str = "user/repo", **options: Any) -> str:
    return push_to_hub(source, repo, token=hub_server.TOKEN, **options)


def one_line(error: Any) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_there_and_back(hub: hub_server.Hub, tmp_path: Path) -> None:
    """A model pushed, and its saved folder pushed, load as the folder itself does; the files are byte for byte the same."""
    model = attached()
    folder = vmoer.save(model, tmp_path / "saved")
    local = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert publish(model).startswith(hub.url)
    publish(folder, "user/folder", private=True)
    assert hub.files("user/repo") == hub.files("user/folder") == local
    for place in ("user/repo", "user/folder", folder, str(folder)):
        assert torch.equal(logits(vmoer.load(tiny.model("granitemoe"), place)), logits(model))


def test_revisions(hub: hub_server.Hub) -> None:
    """A branch, and a commit by its hash, keep what was pushed to them."""
    old, new = attached(beta=0.1), attached(beta=0.2)
    commit = publish(old).rpartition("/")[2]
    publish(new, revision="v2")
    publish(new)
    for revision, model in ((commit, old), ("v2", new), (None, new)):
        loaded = vmoer.load(tiny.model("granitemoe"), "user/repo", revision=revision)
        assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(InputError, match="on the hub it has no revision 'v3'") as error:
        vmoer.load(tiny.model("granitemoe"), "user/repo", revision="v3")
    one_line(error)


def test_what_does_not_fit_is_refused_and_leaves_the_model_as_it_was(hub: hub_server.Hub, tmp_path: Path) -> None:
    publish(attached())
    other = tiny.model("granitemoe")
    other.model.layers[1].block_sparse_moe.router.weight.data.add_(0.1)
    before = logits(other)
    with pytest.raises(InputError, match=r"^user/repo was trained on another base model") as error:
        vmoer.load(other, "user/repo")
    one_line(error)
    assert torch.equal(logits(other), before)
    with pytest.raises(InputError, match="on the hub there is no such repository") as error:
        vmoer.load(other, "user/nothing")
    one_line(error)
    with pytest.raises(InputError, match="is for repositories on the hub"):
        vmoer.load(other, vmoer.save(attached(), tmp_path / "local"), revision="v1")
    hub.files("user/repo")["router.safetensors"] = b"x" + hub.files("user/repo")["router.safetensors"][1:]
    hub.commit("user/repo", "main", hub.files("user/repo"))
    with pytest.raises(InputError, match="truncated or was changed"):
        vmoer.load(tiny.model("granitemoe"), "user/repo")


def test_the_cache_serves_without_a_network(hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    model = attached()
    publish(model)
    vmoer.load(tiny.model("granitemoe"), "user/repo")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    requests = len(hub.log)
    assert torch.equal(logits(vmoer.load(tiny.model("granitemoe"), "user/repo")), logits(model))
    with pytest.raises(InputError, match="on the hub it could not be fetched") as error:
        vmoer.load(tiny.model("granitemoe"), "user/unseen")
    one_line(error)
    assert len(hub.log) == requests


def run_folder(folder: Path) -> Any:
    """As `vmoer train` leaves one: adapter, routers, run.json."""
    from peft import LoraConfig, get_peft_model

    base = tiny.model("granitemoe")
    base.config._name_or_path = "/models/somewhere/base"
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    vmoer.attach(model, vmoer.MeanField())
    run: dict[str, Any] = {
        "model": "/models/somewhere/base",
        "task": "openbookqa",
        "method": "vglr-mf",
        "preset": "default",
    }
    run |= {"stage2": {"best_validation_nll": 0.71234}}
    vmoer.save(model, folder, run=run)
    return model


def publish_base(hub: hub_server.Hub, folder: Path) -> None:
    from vmoer.demo import model_path

    tiny.model("granitemoe").save_pretrained(folder)
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    files |= {p.name: p.read_bytes() for p in Path(model_path("map")).iterdir() if "tokenizer" in p.name}
    hub.create(BASE)
    hub.commit(BASE, "main", files)


def test_a_run_opens_from_the_hub_with_its_base(hub: hub_server.Hub, tmp_path: Path) -> None:
    """Base, adapter and routers, each from its repository; a model's own repository still opens as a model."""
    publish_base(hub, tmp_path / "base")
    model = run_folder(tmp_path / "run")
    with pytest.warns(UserWarning, match="/models/somewhere/base is a local folder"):
        publish(tmp_path / "run", "user/unnamed")
    publish(tmp_path / "run", "user/run", base_model=BASE)
    opened = open_model("user/run", device="cpu")
    assert torch.equal(logits(opened.model), logits(model))
    assert (opened.name, opened.run and opened.run["task"]) == (BASE, "openbookqa")
    assert open_model(BASE, device="cpu").run is None
    assert torch.equal(logits(open_model(BASE, device="cpu").model), logits(tiny.model("granitemoe")))

    publish(attached(), "user/routers")  # no run.json: router.json names the base
    opened = open_model("user/routers", device="cpu")
    assert torch.equal(logits(opened.model), logits(attached()))
    assert (opened.name, opened.run) == (BASE, None)

    hub.create("user/both")  # as a folder of vmoer merge: weights with routers beside them
    hub.commit("user/both", "main", hub.files(BASE) | hub.files("user/routers"))
    assert open_model("user/both", device="cpu").name == "user/both"


def test_pickles_are_neither_asked_for_nor_read(hub: hub_server.Hub, tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    publish(tmp_path / "run", base_model=BASE)
    files = hub.files("user/repo")
    for name in ("router.pt", "adapter_model.bin", "pytorch_model.bin", "nested/evil.pkl"):
        files[name] = b"\x80\x04K\x01."
    hub.commit("user/repo", "main", files)
    hub.log.clear()
    vmoer.load(tiny.model("granitemoe"), "user/repo")
    fetched = {line.rpartition("/")[2] for line in hub.log if "/resolve/" in line}
    assert fetched == {
        "manifest.json",
        "router.json",
        "router.safetensors",
        "run.json",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    del files["adapter_model.safetensors"]
    hub.commit("user/repo", "main", files)
    with pytest.raises(InputError, match=r"has no adapter_model\.safetensors") as error:
        vmoer.load(tiny.model("granitemoe"), "user/repo")
    one_line(error)


def test_pushing_again_replaces_what_is_ours_alone(hub: hub_server.Hub, tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    publish(tmp_path / "run", base_model=BASE)
    hub.commit("user/repo", "main", hub.files("user/repo") | {"notes.txt": b"mine"})
    publish(attached())
    assert set(hub.files("user/repo")) == {
        "README.md",
        "manifest.json",
        "router.json",
        "router.safetensors",
        "notes.txt",
    }


def test_the_card(hub: hub_server.Hub, tmp_path: Path) -> None:
    """Read back by `huggingface_hub`'s own parser: what the hub will show, and what the reader must know."""
    run_folder(tmp_path / "run")
    eval_folder = tmp_path / "eval"
    rows = [
        {"method": method, "metric": metric, "task": "openbookqa", "value": value}
        for method, metric, value in (("vglr-mf", "nll", 0.61), ("vglr-mf", "mce", 0.3), ("map", "nll", 0.9))
    ]
    write_json(eval_folder / "metrics.json", rows)
    local = ModelCard((tmp_path / "run" / "README.md").read_text())
    assert local.data.to_dict().keys() == {"library_name", "tags"}  # a path is no hub name
    publish(tmp_path / "run", base_model=BASE, metrics=eval_folder)
    card = ModelCard(hub.files("user/repo")["README.md"].decode())
    assert (card.data.base_model, card.data.library_name) == (BASE, "vmoer")
    assert "mixture-of-experts" in card.data.tags
    for said in ("`vglr-mf`", "| layers | 0, 1 |", "openbookqa", "0.7123", vmoer.__version__, "LoRA", "| 0.61 |"):
        assert said in card.text, said
    assert "0.9" not in card.text
    assert json.loads(hub.files("user/repo")["run.json"])["model"] == BASE

    (tmp_path / "run" / "README.md").write_text("---\nlibrary_name: vmoer\n---\nMy own words.\n")
    with pytest.warns(UserWarning, match="is a local folder"):
        publish(tmp_path / "run", "user/own")
    assert b"My own words." in hub.files("user/own")["README.md"]


def test_nothing_broken_is_published(hub: hub_server.Hub, tmp_path: Path) -> None:
    folder = vmoer.save(attached(), tmp_path / "saved")
    with pytest.raises(InputError, match="must be written as user/name"):
        publish(folder, "repo")
    with pytest.raises(RunError, match=r"user/repo could not be published: .*401") as error:
        push_to_hub(folder, "user/repo", token="hf_wrong")
    one_line(error)
    with pytest.raises(InputError, match=r"has no metrics\.json"):
        publish(folder, metrics=tmp_path)
    (folder / "router.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="truncated"):
        publish(folder)
    assert not hub.commits
