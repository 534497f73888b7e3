"""VMoERTrainer in one process; under DDP it is in test_train_parallel.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_workers import job, world

import vmoer
from vmoer.errors import InputError
from vmoer.saved import store
from vmoer.training.trainer import VMoERTrainer


def losses(folder: Path) -> list[float]:
    return list(json.loads((folder / "losses.json").read_text()))


def test_accumulation_changes_nothing(tmp_path: Path) -> None:
    """Oracle: the run with 16 rows at once."""
    job.trainer(0, 1, str(tmp_path / "one"), batch=16, accumulate=1)
    run = job.trainer(0, 1, str(tmp_path / "four"), batch=4, accumulate=4)
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "four"), abs=1e-5)
    one, four = (torch.load(tmp_path / name / "routers.pt") for name in ("one", "four"))
    for name, value in one.items():
        torch.testing.assert_close(value, four[name], atol=1e-5, rtol=0)
    assert run.model_accepts_loss_kwargs


@pytest.mark.parametrize("accepts", [True, False])
def test_the_kl_is_a_mean_over_the_tokens_of_the_step(
    accepts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: loss and KL of the first step by hand, one row at a time without padding, for any split of its 16 rows.

    Both for models that take `num_items_in_batch` and for those that do not, whose loss Trainer divides by itself.
    """
    real, given = VMoERTrainer.compute_loss, []

    def compute_loss(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.model_accepts_loss_kwargs = accepts
        given.append({name: value.clone() for name, value in inputs.items()})
        return real(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(VMoERTrainer, "compute_loss", compute_loss)
    job.trainer(0, 1, str(tmp_path / "one"), batch=16, accumulate=1, stop=1)
    job.trainer(0, 1, str(tmp_path / "four"), batch=4, accumulate=4, stop=1)
    batch, model = given[0], job.start()
    tokens, nll, kl = int(batch["attention_mask"].sum()), 0.0, 0.0
    for row in range(16):
        length = int(batch["attention_mask"][row].sum())
        with vmoer.record(model, step=0, first_row=row) as rec:
            logits = model(input_ids=batch["input_ids"][row : row + 1, :length]).logits
        label = batch["labels"][row][batch["labels"][row] != -100]
        nll += torch.nn.functional.cross_entropy(logits[:, -1], label).item() / 16
        kl += rec.kl(tokens=tokens).item()
    assert kl > 0.1
    assert losses(tmp_path / "one") == pytest.approx([nll + kl], abs=1e-4)
    assert losses(tmp_path / "four") == pytest.approx([nll + kl], abs=1e-4)


def test_a_checkpoint_holds_adapter_and_routers_and_not_the_base(tmp_path: Path) -> None:
    """Oracle: the names of all tensors in the folder, and the sizes of the files."""
    run = job.trainer(0, 1, str(tmp_path), batch=8, accumulate=2, lora=True)
    folder = tmp_path / "checkpoint-8"
    adapter, routers = (load_file(folder / f"{name}.safetensors") for name in ("adapter_model", "router"))
    assert adapter
    assert all("lora_" in name for name in adapter)
    assert routers.keys() == store.router_tensors(run.model).keys()
    assert not list(folder.glob("model*")) + list(folder.glob("pytorch_model*"))
    base = world.model()
    loaded = vmoer.load(base, folder)
    batch = {"input_ids": torch.tensor([world.examples(1).prompts[0]])}
    torch.testing.assert_close(vmoer.predict(loaded, batch), vmoer.predict(run.model.eval(), batch))


@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(lora: bool, tmp_path: Path) -> None:
    """Oracle: the run that was never stopped, bit for bit."""
    job.trainer(0, 1, str(tmp_path / "whole"), batch=8, accumulate=2, lora=lora)
    job.trainer(0, 1, str(tmp_path / "cut"), batch=8, accumulate=2, lora=lora, stop=4)
    assert len(losses(tmp_path / "cut")) == 4
    job.trainer(0, 1, str(tmp_path / "cut"), batch=8, accumulate=2, lora=lora, resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    whole, cut = (torch.load(tmp_path / name / "routers.pt") for name in ("whole", "cut"))
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())


def test_a_model_with_nothing_attached_is_refused(tmp_path: Path) -> None:
    import transformers as tf

    with pytest.raises(InputError, match="no method is attached"):
        VMoERTrainer(model=world.model(), args=tf.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))
