"""Novelty at its default rank tells the embedded model's shifts apart as all directions do."""

import pytest
import tiny
import torch
from torch import Tensor

import vmoer
from vmoer import tasks
from vmoer.errors import InputError
from vmoer.live.attach import routers_of
from vmoer.metrics import auroc
from vmoer.models import open_model
from vmoer.tasks.prompt import prompt


def test_the_default_rank_is_within_a_hundredth_of_all_directions() -> None:
    """Oracle: every direction (`rank="full"`). At 16 the far shift is told apart otherwise, so that a small rank would show."""
    model, tokenizer, *_ = open_model("demo", device="cpu")
    vmoer.attach(model, vmoer.MeanField())

    def batch(task: str, split: str, n: int) -> dict[str, Tensor]:
        questions = tasks.load(task, split, limit=n)
        tokenizer.padding_side = "left"
        return dict(tokenizer([prompt(tokenizer, q) for q in questions], padding=True, return_tensors="pt"))

    known = batch("demo", "train", 150)
    asked = {task: batch(task, "test", 100) for task in ("demo", "demo-near", "demo-far")}
    found = {}
    for rank in (None, "full", 16):
        vmoer.fit(model, [known], rank=rank)
        values = {}
        for task, given in asked.items():
            with vmoer.record(model, signals=["novelty"]) as rec, torch.no_grad():
                model(input_ids=given["input_ids"], attention_mask=given["attention_mask"])
            values[task] = rec.signals["novelty"][:, :, -1].mean(0).numpy()
        found[rank] = [auroc(values["demo"], values[shift]) for shift in ("demo-near", "demo-far")]
    assert found[None] == pytest.approx(found["full"], abs=0.01)
    assert found[16] != pytest.approx(found["full"], abs=0.01)


def test_laplace_keeps_every_direction_and_others_as_many_as_are_asked_for() -> None:
    for config, rank, rows in ((vmoer.Laplace(), None, 32), (vmoer.MeanField(), "full", 32), (vmoer.MeanField(), 5, 5)):
        model = vmoer.attach(tiny.model("granitemoe"), config)
        vmoer.fit(model, [tiny.batch()], rank=rank)  # type: ignore[arg-type]
        assert {len(router.novelty_root_RD) for router in routers_of(model).values()} == {rows}


@pytest.mark.parametrize("rank", [0, -3, "half", 2.5])
def test_a_rank_that_is_none_is_one_line(rank: object) -> None:
    model = vmoer.attach(tiny.model("granitemoe"), vmoer.MeanField())
    with pytest.raises(InputError, match="must be a whole number of at least 1, or 'full'"):
        vmoer.fit(model, [tiny.batch()], rank=rank)  # type: ignore[arg-type]
