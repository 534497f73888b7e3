"""`vmoer merge`, and what `vmoer serve` makes of its folder. Oracle: the run itself, with its adapter beside the base model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import served
import torch

import vmoer
from vmoer.cli import run as command_line
from vmoer.errors import InputError
from vmoer.files import locked
from vmoer.models import open_model
from vmoer.saved import calibrator, merged
from vmoer.saved.fetch import FETCHED
from vmoer.saved.store import read_folder
from vmoer.serving import launch, merging


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A base model, a run over an adapter, with a calibrator, and the two merged."""
    pytest.importorskip("peft")
    root = tmp_path_factory.mktemp("merge")
    base = served.build("granite", root / "base")
    run = served.train(base, "vglr-fc", root / "run", lora=True, calibrator=served.CALIBRATOR)
    assert command_line(["merge", str(run), "--out", str(root / "merged")]) == 0
    return base, run, root / "merged"


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`launch.prepare` as if vLLM were there."""
    monkeypatch.setattr(launch, "check_vllm", lambda: None)
    return launch.prepare


def test_the_folder_is_the_run_without_an_adapter(folders: tuple[Path, Path, Path]) -> None:
    base, run, whole = folders
    opened, bare = open_model(run, device="cpu"), served.opened(base)
    ids = opened.tokenizer(served.PROMPTS[1], return_tensors="pt")["input_ids"]
    model = served.opened(whole)
    assert not any("lora" in name for name, _ in model.named_parameters())
    vmoer.load(model, whole)
    with vmoer.record(opened.model) as want, torch.no_grad():
        expected = opened.model(input_ids=ids).logits
    with vmoer.record(model) as rec, torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(bare(input_ids=ids).logits, expected, atol=1e-2)
    assert torch.equal(rec.experts, want.experts)
    for name, value in want.signals.items():
        torch.testing.assert_close(rec.signals[name], value, rtol=1e-4, atol=1e-5)
    kept, given = (calibrator.of(read_folder(folder)) for folder in (whole, run))
    assert kept is not None
    assert given is not None
    assert kept.calibrator == given.calibrator


def test_serve_knows_the_merged_base_and_no_other(folders: tuple[Path, Path, Path], prepared: Any) -> None:
    base, run, whole = folders
    for router in (whole, run):
        assert str(router) in " ".join(prepared(str(whole), str(router), None, ["--port", "0"]).arguments)
    with pytest.raises(
        InputError, match=f"over a LoRA adapter, which {base} does not hold: vmoer merge {run} --out DIR"
    ):
        prepared(str(base), str(run), None, [])
    with pytest.raises(InputError, match=rf"in the model's weights \(vmoer merge\), which {base} does not hold"):
        prepared(str(base), str(whole), None, [])


def test_routers_go_onto_the_weights_that_they_were_trained_on(
    folders: tuple[Path, Path, Path], prepared: Any, tmp_path: Path
) -> None:
    """Routers apart from the weights, as the hub gives them, know them all the same. Oracle: the run itself."""
    base, run, whole = folders
    ids = torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        expected = open_model(run, device="cpu").model(input_ids=ids).logits
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    for name in FETCHED:
        if (whole / name).exists():
            shutil.copy(whole / name, fetched)
    for router in (whole, fetched, run):
        model = vmoer.load(served.opened(whole), router)
        assert not any("lora" in name for name, _ in model.named_parameters())
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        prepared(str(whole), str(router), None, ["--port", "0"])
    again = vmoer.save(model, tmp_path / "again")
    for router in (whole, fetched, again):
        with pytest.raises(InputError, match="which this model does not hold"):
            vmoer.load(served.opened(base), router)
        with pytest.raises(InputError, match=f"which {base} does not hold"):
            prepared(str(base), str(router), None, [])


def test_routers_of_the_base_do_not_go_onto_merged_weights(
    folders: tuple[Path, Path, Path], prepared: Any, tmp_path: Path
) -> None:
    base, _, whole = folders
    plain = served.train(base, "vglr-mf", tmp_path / "plain")
    with pytest.raises(InputError, match="was trained on the base model, and the weights of this model hold"):
        vmoer.load(served.opened(whole), plain)
    with pytest.raises(InputError, match=f"was trained on the base model, and the weights of {whole} hold"):
        prepared(str(whole), str(plain), None, [])


def test_a_run_over_merged_weights_is_merged_again(
    folders: tuple[Path, Path, Path], prepared: Any, tmp_path: Path
) -> None:
    _, run, whole = folders
    second = served.train(whole, "vglr-mf", tmp_path / "second", lora=True, seed=9)
    twice = merging.merge(str(second), tmp_path / "twice")
    assert merged.held_by(str(twice)) == [read_folder(x).description["adapter"] for x in (run, second)]
    for router in (twice, second):
        prepared(str(twice), str(router), None, ["--port", "0"])
    for router in (whole, run):
        with pytest.raises(InputError, match="does not hold"):
            prepared(str(twice), str(router), None, [])


def test_another_adapter_is_another_model(folders: tuple[Path, Path, Path], prepared: Any, tmp_path: Path) -> None:
    base, _, whole = folders
    other = served.train(base, "vglr-mf", tmp_path / "other", lora=True, seed=8)
    with pytest.raises(InputError, match="over a LoRA adapter"):
        prepared(str(whole), str(other), None, [])
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({merged.KEY: [3]}))
    with pytest.raises(InputError, match=r"vmoer_adapters of config\.json is not what vmoer merge writes"):
        prepared(str(tmp_path / "odd"), str(other), None, [])


def test_a_run_without_an_adapter_is_copied_and_needs_no_note(tmp_path: Path, prepared: Any) -> None:
    base = served.build("qwen3_moe", tmp_path / "base")
    run = served.train(base, "vglr-mf", tmp_path / "run")
    whole = merging.merge(str(run), tmp_path / "deep" / "whole", dtype="bfloat16")
    assert merged.KEY not in json.loads((whole / "config.json").read_text())
    assert {p.dtype for p in open_model(whole, device="cpu", dtype="auto").model.parameters()} == {torch.bfloat16}
    for model, router in ((whole, whole), (whole, run), (base, whole)):
        prepared(str(model), str(router), None, ["--port", "0"])


def test_nothing_is_overwritten_or_left_half_written(
    folders: tuple[Path, Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, run, whole = folders
    for out in (whole, run, run / "router.json"):
        assert command_line(["merge", str(run), "--out", str(out)]) == 2
        assert capsys.readouterr().err.splitlines() == [f"{out} is not empty: give a new folder"]

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merging, "save", fails)
    assert command_line(["merge", str(run), "--out", str(tmp_path / "new")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_one_process_merges_into_a_folder_and_a_killed_one_leaves_nothing(
    folders: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the merged folder, byte for byte."""
    _, run, whole = folders
    out, beside = tmp_path / "out", tmp_path / ".out.merge"
    command = ["merge", str(run), "--out", str(out)]
    with locked(beside):
        assert command_line(command) == 1
    assert f"{beside} is in use by another vmoer" in capsys.readouterr().err
    (tmp_path / "kept" / ("0" * 16)).mkdir(parents=True)
    beside.symlink_to("kept")
    assert command_line(command) == 2
    assert f"{beside} is a link" in capsys.readouterr().err
    assert (tmp_path / "kept" / ("0" * 16)).exists()
    beside.unlink()
    shutil.rmtree(tmp_path / "kept")
    (beside / ("0" * 16)).mkdir(parents=True)
    (beside / ("0" * 16) / "model.safetensors").touch()
    assert command_line(command) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}
