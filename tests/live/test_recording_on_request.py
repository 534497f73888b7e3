"""Which signals a record computes, what it refuses, and what recording costs on a CPU."""

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch

import vmoer
from vmoer.errors import InputError
from vmoer.live.attach import routers_of
from vmoer.models import open_model


def attached(key: str = "vglr-fc") -> torch.nn.Module:
    model = vmoer.attach(tiny.model("granitemoe"), vmoer.methods()[key]())
    vmoer.fit(model, [tiny.batch()])
    return model.eval()


@pytest.mark.parametrize(
    ("signals", "names"),
    [
        (None, ["gate_entropy", "logit_variance", "novelty"]),
        ("all", ["gate_entropy", "logit_variance", "mc_logit_variance", "novelty"]),
        (["novelty"], ["novelty"]),
        (("novelty", "gate_entropy"), ["gate_entropy", "novelty"]),
        (["mc_logit_variance"], ["mc_logit_variance"]),
        ([], []),
    ],
)
def test_signals_are_those_asked_for(signals, names) -> None:
    """Whatever is asked beside it, a signal is the same. Oracle of the points' variance: torch.var over q's own samples."""
    model, batch = attached(), tiny.batch()
    with vmoer.record(model, signals="all") as everything, torch.no_grad():
        model(**batch)
    with vmoer.record(model, signals=signals) as rec, torch.no_grad():
        model(**batch)
    assert list(rec.signals) == names
    for name in names:
        assert torch.equal(rec.signals[name], everything.signals[name])
    with vmoer.record(model, step=0) as trained:
        model(**batch)
    router = next(iter(routers_of(model).values()))
    posterior: Any = next(iter(trained.passes[0][1].values())).posterior
    samples_TSN = posterior.q.samples(router.points())
    expected_T = samples_TSN.detach().var(1).sum(-1)
    torch.testing.assert_close(everything.signals["mc_logit_variance"][0].flatten(), expected_T)


def test_nothing_costly_is_computed_unasked(monkeypatch) -> None:
    model = attached()
    for name in ("costly_signals", "divergence"):
        monkeypatch.setattr(vmoer.routers._gaussian.GaussianPosterior, name, lambda self: pytest.fail("was computed"))
    with vmoer.record(model) as rec, torch.no_grad():
        model(**tiny.batch())
    with pytest.raises(InputError, match=r"keeps no KL: ask for it by vmoer.record\(model, kl=True\)"):
        rec.kl()


@pytest.mark.parametrize(
    ("signals", "message"),
    [
        (["temperature"], "vglr-fc has no signal 'temperature' in this pass: it has gate_entropy, logit_variance"),
        ("novelty", "must be a list of names, or 'all'"),
        ([3], "must be a list of names, or 'all'"),
    ],
)
def test_what_a_method_does_not_have_is_one_line(signals, message) -> None:
    model = attached()
    with pytest.raises(InputError, match=message), vmoer.record(model, signals=signals), torch.no_grad():
        model(**tiny.batch())


def test_novelty_before_fit_is_one_line() -> None:
    model = vmoer.attach(tiny.model("granitemoe"), vmoer.MeanField()).eval()
    with pytest.raises(InputError, match="call vmoer\\.fit"), vmoer.record(model, signals=["novelty"]), torch.no_grad():
        model(**tiny.batch())


def test_a_record_inside_a_record_is_one_line_and_in_a_task_of_its_own_it_is_none() -> None:
    model, batch = attached(), tiny.batch()
    with vmoer.record(model), pytest.raises(InputError, match="recorded already"), vmoer.record(model):
        pass
    with vmoer.record(model) as before, torch.no_grad():  # the refusal left nothing behind
        model(**batch)

    async def own() -> torch.Tensor:
        with vmoer.record(model) as rec, torch.no_grad():
            model(**batch)
        return rec.signals["novelty"]

    async def main() -> torch.Tensor:
        with vmoer.record(model) as outer, torch.no_grad():
            inner = await asyncio.create_task(own())
            model(**batch)
        assert len(outer.passes) == 1
        return inner

    assert torch.equal(asyncio.run(main()), before.signals["novelty"])


@pytest.mark.parametrize("key", sorted(vmoer.methods()))
def test_recording_costs_at_most_a_quarter_of_a_pass(key: str) -> None:
    """512 tokens on the embedded model with novelty fitted: processor time against the same passes without a record."""
    model = open_model("demo", device="cpu").model.eval()
    ids = torch.randint(5, 45, (16, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    vmoer.fit(vmoer.attach(model, vmoer.methods()[key]()), [batch])

    def recorded() -> None:
        with vmoer.record(model):
            model(**batch)

    def seconds(run: Callable[[], object]) -> float:
        start = time.thread_time()
        run()
        return time.thread_time() - start

    with torch.no_grad():
        for _ in range(3):
            pairs = [(seconds(lambda: model(**batch)), seconds(recorded)) for _ in range(15)]
            ratio = statistics.median(r for _, r in pairs) / statistics.median(p for p, _ in pairs)
            if ratio <= 1.25:
                return
    assert ratio <= 1.25
