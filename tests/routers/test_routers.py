"""The methods' own mathematics, each against a closed form or an enumeration."""

import itertools
import math
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

import vmoer
from vmoer import gates
from vmoer.errors import InputError
from vmoer.live.attach import routers_of, switched_off
from vmoer.live.fitting import _set, _Sums
from vmoer.routers import Call, methods


def gate(experts: int = 6, hidden: int = 32, k: int = 2) -> gates.Gate:
    model = tiny.model("granitemoe", num_local_experts=experts, hidden_size=hidden, num_experts_per_tok=k)
    return gates.Gate.probe(gates.find(model)[0])


def router(config: Any, g: gates.Gate, weight: Tensor | None = None) -> Any:
    weight = torch.zeros(g.num_experts, g.hidden_size) if weight is None else weight
    return config.router(config, g, weight, 0, torch.device("cpu"))


def call(tokens: int, **kwargs: Any) -> Call:
    return Call(0, torch.arange(tokens), torch.zeros(tokens, dtype=torch.long), **kwargs)


@pytest.mark.parametrize(("key", "millions"), [("vglr-mf", 6.2), ("vglr-fc", 9.2), ("vtsr", 5.9)])
def test_parameter_counts_of_the_paper(key: str, millions: float) -> None:
    """Table 4 at Granite-3B geometry: ten layers of D = 1536, N = 40, from the modules themselves on the meta device."""
    config = tiny.config(
        "granitemoe",
        hidden_size=1536,
        num_local_experts=40,
        num_experts_per_tok=8,
        num_hidden_layers=10,
        num_attention_heads=24,
    )
    from transformers import GraniteMoeForCausalLM

    with torch.device("meta"):
        model = GraniteMoeForCausalLM(config)
    vmoer.attach(model, methods()[key]())
    count = sum(p.numel() for r in routers_of(model).values() for p in r.parameters())
    assert round(count / 1e6, 1) == millions


def test_rank_zero_is_mean_field() -> None:
    """The same backbone and heads: the same samples, the same KL, the same averaged logits."""
    g, u, own = gate(), torch.randn(9, 32), torch.randn(9, 6)
    mean_field, low_rank = router(vmoer.MeanField(), g), router(vmoer.LowRank(rank=0), g)
    low_rank.load_state_dict(mean_field.state_dict())
    for how in (call(9), call(9, step=3)):
        a, b = mean_field(u, own, how, None), low_rank(u, own, how, None)
        torch.testing.assert_close(a.select_TN, b.select_TN)
        torch.testing.assert_close(a.posterior.divergence(), b.posterior.divergence(), atol=1e-6, rtol=1e-5)


def test_heads_start_at_the_prior() -> None:
    for config in (
        vmoer.MeanField(prior_scale=2.0),
        vmoer.FullCovariance(prior_scale=2.0),
        vmoer.LowRank(prior_scale=2.0),
    ):
        out = router(config, gate())(torch.randn(9, 32), torch.randn(9, 6), call(9), None)
        assert out.posterior.divergence().abs().max() < 1e-2
        torch.testing.assert_close(out.posterior.signals()["logit_variance"], torch.full((9,), 24.0), rtol=0.02, atol=0)


@pytest.mark.parametrize("config", [vmoer.MeanField, vmoer.FullCovariance, vmoer.LowRank])
def test_the_mean_starts_as_the_listing_leaves_it(config: Any) -> None:
    """Oracle: nn.Linear's own law, uniform with a variance of 1/(3 H); the covariance's head starts as ever."""
    rows = {}
    for start in ("prior", "listing"):
        made = router(config(mean_start=start), gate(16, 64))
        mean, rest = made.heads.weight.split([made.sizes[0], sum(made.sizes[1:])])
        rows[start] = (mean, rest)
    hidden = rows["listing"][0].shape[1]
    assert rows["listing"][0].abs().max() <= hidden**-0.5
    assert rows["listing"][0].var().item() == pytest.approx(1 / (3 * hidden), rel=0.2)
    assert rows["prior"][0].std().item() == pytest.approx(1e-3, rel=0.2)
    assert torch.equal(rows["prior"][1], rows["listing"][1])


def test_the_controls() -> None:
    """mean-only moves the logits and has no spread; fixed-noise has spread and nothing to train."""
    g, u, own = gate(), torch.randn(9, 32), torch.randn(9, 6)
    mean_only = router(vmoer.MeanField(learn="mean"), g)
    with torch.no_grad():
        mean_only.heads.weight.normal_()
    averaged, drawn = mean_only(u, own, call(9), None), mean_only(u, own, call(9, step=1), None)
    assert torch.equal(averaged.select_TN, drawn.select_TN)
    shift = averaged.select_TN - own
    torch.testing.assert_close(averaged.posterior.divergence(), shift.square().sum(-1) / 2)
    fixed = router(vmoer.MeanField(learn="nothing", prior_scale=2.0), g)
    assert not list(fixed.parameters())
    torch.testing.assert_close(
        fixed(u, own, call(9), None).posterior.signals()["logit_variance"], torch.full((9,), 24.0)
    )


def test_temperature_starts_at_one_and_keeps_its_bounds() -> None:
    r = router(vmoer.VariationalTemperature(t_min=0.1, t_max=5.0), gate())
    u = torch.randn(50, 32)
    assert torch.equal(r.temperature(u), torch.ones(50))
    with torch.no_grad():
        r.head.weight.normal_(std=100)
    temperature = r.temperature(u)
    assert 0.1 <= temperature.min() < 0.2
    assert 4.5 < temperature.max() <= 5.0


@pytest.mark.parametrize("start", [0.06, 0.3, 1.0, 2.5, 9.0])
def test_temperature_starts_at_the_prior(start: float) -> None:
    """Wherever the prior is centred, T starts there and the prior's penalty at nothing; its slope in the head is not zero."""
    r = router(vmoer.VariationalTemperature(prior_mean=start), gate())
    u = torch.randn(50, 32)
    torch.testing.assert_close(r.temperature(u), torch.full((50,), start), rtol=1e-4, atol=1e-5)
    assert r(u, torch.randn(50, 6), call(50), None).posterior.divergence().max() < 1e-6
    (slope,) = torch.autograd.grad(r.temperature(u).sum(), r.head.bias)
    assert slope.item() > 0


def test_the_papers_preset_starts_at_one_and_weighs_as_printed() -> None:
    """Ours starts where sampling costs no accuracy; the paper's protocol stays what it was, beside it."""
    from vmoer.training.run import DEFAULT, PAPER

    printed: Any = PAPER.config("vtsr")
    ours: Any = DEFAULT.config("vtsr")
    assert (printed.prior_mean, printed.weights, printed.regulariser) == (1.0, "scaled", "neg_log_t")
    assert (ours.prior_mean, ours.weights, ours.regulariser) == (0.15, "own", "lognormal")


def test_a_prior_outside_the_bounds_is_refused() -> None:
    with pytest.raises(InputError, match="prior_mean"):
        vmoer.VariationalTemperature(prior_mean=0.01, t_min=0.05)


def test_own_weights_at_a_low_temperature_are_the_model() -> None:
    """At T -> 0 the experts are the model's own and so are their weights; with l / T the weights are sharper."""
    g = gate()
    u, own = torch.randn(40, 32), torch.randn(40, 6) * 3
    gap_T = own.sort(-1).values.diff(dim=-1).amin(-1)
    own = own[gap_T > 0.05]  # no near ties
    u = u[: len(own)]
    wanted = g.scoring.choose(own, None)
    weighed = g.scoring.weigh(own, wanted, None)
    settings: dict[str, Any] = {"prior_mean": 0.0011, "t_min": 0.001}
    for weights in ("own", "scaled"):
        out = router(vmoer.VariationalTemperature(weights=weights, **settings), g)(u, own, call(len(own)), None)
        chosen = g.scoring.choose(out.select_TN, None)
        assert torch.equal(chosen, wanted)
        same = torch.allclose(g.scoring.weigh(out.weight_TN, chosen, None), weighed)
        assert same == (weights == "own")


def test_regularisers_against_their_formulas() -> None:
    own, temperature = torch.randn(7, 6), torch.rand(7) * 3 + 0.2
    from vmoer.routers.variational_temperature import TemperaturePosterior

    p = torch.distributions.Categorical(logits=own / temperature.unsqueeze(-1))
    uniform = torch.distributions.Categorical(logits=torch.zeros(7, 6))
    expected = {
        "neg_log_t": -temperature.log(),
        "entropy": torch.distributions.kl_divergence(p, uniform),
        "lognormal": -torch.distributions.Normal(math.log(0.3), 0.5).log_prob(temperature.log())
        - math.log(0.5 * math.sqrt(2 * math.pi)),
    }
    for name, value in expected.items():
        torch.testing.assert_close(
            TemperaturePosterior(temperature, own, name, 0.5, 0.3).divergence(), value, atol=1e-5, rtol=1e-5
        )


def test_sample_k_frequencies_against_enumeration() -> None:
    """VTSR at a fixed temperature: how often each set is chosen over 20,000 positions, against the exact probability."""
    g, draws = gate(experts=5, k=2), 20_000
    r = router(vmoer.VariationalTemperature(), g)
    with torch.no_grad():
        r.head.bias.fill_(1.0)
    own, u = torch.tensor([0.5, -1.0, 1.5, 0.0, 0.8]), torch.zeros(1, 32)
    temperature = r.temperature(u).item()
    out = r(u.expand(draws, 32), own.expand(draws, 5), call(draws), None)
    chosen = g.scoring.choose(out.select_TN, None).sort(-1).values
    p = torch.softmax(own / temperature, -1).tolist()
    for i, j in itertools.combinations(range(5), 2):
        exact = p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j])
        seen = (chosen == torch.tensor([i, j])).all(-1).float().mean().item()
        assert abs(seen - exact) < 4.5 * math.sqrt(exact * (1 - exact) / draws)
    torch.testing.assert_close(out.weight_TN[0], own / temperature)


def test_straight_through_gradient_against_enumeration() -> None:
    """A toy of five experts, two chosen, each with a fixed output; the loss is quadratic in their mix.

    The exact gradient of the expected loss in T is a sum over all sets. The estimator is biased, so what is asserted is what
    training needs: over random toys it correlates with the exact gradient and agrees in sign far more often than chance.
    """
    g, draws = gate(experts=5, k=2), 4_000
    generator = torch.Generator().manual_seed(1)
    exact, estimated = [], []
    for _ in range(30):
        own, values = 1.5 * torch.randn(5, generator=generator), torch.randn(5, generator=generator)
        target = torch.randn((), generator=generator)
        temperature = (0.5 + torch.rand((), generator=generator)).requires_grad_()

        def loss(weights: Tensor, chosen: Tensor, values: Tensor = values, target: Tensor = target) -> Tensor:
            return ((weights * values[chosen]).sum(-1) - target).square()

        total = torch.zeros((), dtype=torch.float64)
        for s in itertools.combinations(range(5), 2):
            chosen = torch.tensor([s])
            rate = torch.log_softmax(own.double() / temperature, -1).exp()
            probability = sum(rate[i] * rate[j] / (1 - rate[i]) for i, j in (s, s[::-1]))
            total = (
                total
                + probability * loss(g.scoring.weigh((own / temperature).unsqueeze(0), chosen, None), chosen).sum()
            )
        exact.append(torch.autograd.grad(total, temperature)[0].item())

        scaled = (own / temperature).expand(draws, 5)
        gumbel = call(draws).gumbel(0, 5)
        like = (torch.zeros(draws, 5), torch.zeros(draws, 2), torch.zeros(draws, 2, dtype=torch.long))
        out = [like[i] for i in range(3)]
        answer = [out[0]] * 3
        for place, value in zip((g.places["logits"], g.places["weights"], g.places["indices"]), like, strict=True):
            answer[place] = value
        perturbed = own + temperature.detach() * gumbel
        routed, chosen = g.route(nn.Identity(), tuple(answer), perturbed, scaled, None, scaled + gumbel)
        mean = loss(routed[g.places["weights"]], chosen).mean()
        estimated.append(torch.autograd.grad(mean, temperature)[0].item())
    a, b = torch.tensor(exact), torch.tensor(estimated)
    assert torch.corrcoef(torch.stack([a, b]))[0, 1] > 0.6
    assert ((a > 0) == (b > 0)).float().mean() > 0.7


def test_laplace_is_a_bayesian_linear_model() -> None:
    """The logits' covariance against the posterior predictive computed in float64 from the same activations."""
    model = tiny.model("granitemoe")
    scale, damping, batch = 0.8, 2.5, tiny.batch()
    inputs: list[Tensor] = []
    first = gates.find(model)[0].router
    vmoer.attach(model, vmoer.Laplace(prior_scale=scale))
    handle = first.register_forward_pre_hook(lambda m, args: inputs.append(args[0].reshape(-1, 32).double()))
    vmoer.fit(model, [batch], damping=damping)
    handle.remove()
    u = inputs[0][batch["attention_mask"].reshape(-1).bool()]
    precision = damping * torch.eye(32, dtype=torch.float64) + u.mT @ u
    new = torch.randn(20, 32)
    spread = (new.double() @ torch.linalg.inv(precision) * new.double()).sum(-1)
    r = routers_of(model)[0]
    q = r(new, torch.zeros(20, 6), call(20), None).posterior.q
    for t in range(20):
        columns = [q.rows(t, t + 1).times(torch.eye(6)[i : i + 1])[0] for i in range(6)]
        expected = scale**2 * spread[t] * torch.eye(6, dtype=torch.float64)
        torch.testing.assert_close(torch.stack(columns).double(), expected, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(r.novelty(new).double(), spread, rtol=1e-4, atol=0)


def test_novelty_is_measured_on_the_states_of_the_method_s_own_routing() -> None:
    """Oracle: float64 sums over what enters the last router when the attached model is simply run."""
    model, batch = tiny.model("granitemoe"), tiny.batch()
    last = gates.find(model)[-1]
    inputs: list[Tensor] = []
    vmoer.attach(model, vmoer.MeanField(prior_scale=3.0))
    last.router.register_forward_pre_hook(lambda m, args: inputs.append(args[0].reshape(-1, 32).double()))
    with torch.no_grad():
        model(**batch)
        with switched_off(model):
            model(**batch)
    vmoer.fit(model, [batch])
    real = batch["attention_mask"].reshape(-1).bool()
    ours, plain = (x[real].mT @ x[real] + torch.eye(32, dtype=torch.float64) for x in inputs[:2])
    assert (ours - plain).abs().max() > 1e-3  # at this width the method routes otherwise
    new = torch.randn(20, 32)
    spread = (new.double() @ torch.linalg.inv(ours) * new.double()).sum(-1)
    torch.testing.assert_close(routers_of(model)[last.layer].novelty(new).double(), spread, rtol=1e-4, atol=0)


def test_states_that_are_nearly_alike_can_be_fitted() -> None:
    """As those of a wide model are: in float32 their sum has no Cholesky factor at all. Oracle: the Woodbury identity."""
    generator, dim = torch.Generator().manual_seed(0), 256
    shared = 30 * torch.randn(dim, generator=generator)
    u = shared + 0.01 * torch.randn(2048, dim, generator=generator)
    single = (u.mT @ u).double() + torch.eye(dim, dtype=torch.float64)
    assert torch.linalg.cholesky_ex(single).info > 0
    sums, r = _Sums(), router(vmoer.Deterministic(), gate(hidden=dim))
    for part in u.split(1000):
        sums(0, part, torch.zeros(len(part), 6))
    _set(r, sums.outer_DD[0], 1.0, rank="full")
    new = torch.randn(5, dim, generator=generator)
    seen = new.double() @ u.double().mT
    gram = torch.linalg.solve(torch.eye(2048, dtype=torch.float64) + u.double() @ u.double().mT, seen.mT)
    exact = new.double().square().sum(-1) - (seen * gram.mT).sum(-1)
    torch.testing.assert_close(r.novelty(new).double(), exact, rtol=1e-3, atol=0)


def test_novelty_by_a_few_random_rows() -> None:
    """Oracle: a fixed vector's squared length along R of D random orthogonal directions is Beta(R / 2, (D - R) / 2)."""
    dim, rank = 32, 8
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(500, dim, generator=generator) * torch.logspace(2, -2, dim)  # most of a state in few directions
    outer = (u.mT @ u).double()
    new = torch.randn(3, dim, generator=generator) * torch.logspace(2, -2, dim)
    exact = (new.double() @ torch.linalg.inv(outer + torch.eye(dim, dtype=torch.float64)) * new.double()).sum(-1)
    r = router(vmoer.Deterministic(), gate())
    _set(r, outer, 1.0, rank="full")
    torch.testing.assert_close(r.novelty(new).double(), exact, rtol=1e-3, atol=0)
    _set(r, outer, 1.0, rank=dim)
    torch.testing.assert_close(r.novelty(new).double(), exact, rtol=1e-3, atol=0)
    found = []
    for r.layer in range(600):
        _set(r, outer, 1.0, rank=rank)
        found.append(r.novelty(new).double() / exact)
    assert r.novelty_root_RD.shape == (rank, dim)
    drawn = torch.stack(found)  # [layer, token]
    spread = (2 * (dim - rank) / (rank * (dim + 2))) ** 0.5
    assert (drawn.mean(0) - 1).abs().max() < 4 * spread / 600**0.5
    assert (drawn.std(0) / spread - 1).abs().max() < 0.15
    _set(r, outer, 1.0, rank=rank)
    assert torch.equal(r.novelty(new).double() / exact, found[-1])  # the same every time


def test_swag_moments() -> None:
    """Mean and diagonal of the snapshots against torch.var_mean; the law of the weights against its covariance."""
    r = router(vmoer.SWAG(rank=4), gate(experts=2, hidden=8, k=1))
    snapshots = torch.randn(7, 2, 8)
    for s in snapshots:
        with torch.no_grad():
            r.delta.copy_(s)
        r.collect()
    variance, mean = torch.var_mean(snapshots, 0, correction=0)
    torch.testing.assert_close(r.mean_ND, mean, atol=1e-6, rtol=1e-5)
    running = torch.stack([snapshots[i] - snapshots[: i + 1].mean(0) for i in range(3, 7)])
    torch.testing.assert_close(r.deviations_KND, running, atol=1e-5, rtol=1e-5)
    drawn = r.weights(*r.noise(torch.arange(20_000))).reshape(20_000, -1)
    deviations = running.reshape(4, -1)
    covariance = torch.diag(variance.flatten() / 2) + deviations.mT @ deviations / (2 * 3)
    torch.testing.assert_close(drawn.mean(0), mean.flatten(), atol=0.05, rtol=0)
    torch.testing.assert_close(torch.cov(drawn.T), covariance, atol=0.06, rtol=0.05)


def test_mc_dropout_against_a_loop() -> None:
    """S masks written out: softmax of (u m / (1 - p)) (W + Delta)', averaged."""
    g, u, weight = gate(), torch.randn(9, 32), torch.randn(6, 32)
    r = router(vmoer.MCDropout(samples=5, dropout=0.3), g, weight)
    with torch.no_grad():
        r.delta.normal_(std=0.1)
    from vmoer.numerics import noise

    total = torch.zeros(9, 6)
    for s in range(5):
        keep = (noise.uniform(0, 5, torch.tensor(s), 0, torch.arange(32)) > 0.3).float() / 0.7
        total += torch.softmax((u * keep) @ (weight + r.delta).detach().T, -1) / 5
    out = r(u, u @ weight.T, call(9), weight)
    torch.testing.assert_close(torch.softmax(out.select_TN, -1).detach(), total, atol=1e-5, rtol=1e-4)
    assert 0.6 < (noise.uniform(0, 5, torch.arange(1000), 0) > 0.3).float().mean() < 0.8


def test_padding_does_not_enter_the_kl() -> None:
    model, batch = tiny.model("qwen2_moe"), tiny.batch()
    vmoer.attach(model, vmoer.FullCovariance())
    for r in routers_of(model).values():
        r.heads.weight.data.normal_(std=0.1)
    wide = {k: torch.nn.functional.pad(v, (0, 5)) for k, v in batch.items()}
    values = []
    for inputs in (batch, wide):
        for step in (None, 4):
            with vmoer.record(model, kl=True, step=step) as rec:
                model(**inputs)
            values.append(rec.kl().item())
    assert min(values) > 0
    assert values[2:] == pytest.approx(values[:2], rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: vmoer.routers.method("vglr_fc"), "did you mean vglr-fc"),
        (lambda: vmoer.MeanField(sampling="quasi"), "choose one of fixed, mc"),  # type: ignore[arg-type]
        (lambda: vmoer.MeanField(samples=0), "samples=0 must be at least 1"),
        (lambda: vmoer.FullCovariance(beta=-1), "beta=-1"),
        (lambda: vmoer.LowRank(rank=-1), "rank=-1"),
        (lambda: vmoer.VariationalTemperature(regulariser="none"), "choose one of neg_log_t"),
        (lambda: vmoer.MeanField(layers="first"), "layers must be"),  # type: ignore[arg-type]
    ],
)
def test_bad_configurations(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (vmoer.MCDropout, {"dropout": 1.0}),
        (vmoer.MCDropout, {"dropout": 1.5}),
        (vmoer.FullCovariance, {"prior_scale": float("inf")}),
        (vmoer.FullCovariance, {"beta": float("nan")}),
        (vmoer.FullCovariance, {"samples": 10**7}),
        (vmoer.FullCovariance, {"samples": 2.5}),
        (vmoer.LowRank, {"rank": 10**7}),
        (vmoer.SWAG, {"rank": 10**7}),
        (vmoer.VariationalTemperature, {"t_min": 1.0, "prior_mean": 2.0}),
        (vmoer.VariationalTemperature, {"t_max": float("inf")}),
        (vmoer.Temperature, {"temperature": "1"}),
        (vmoer.MeanField, {"layers": [0.9]}),
        (vmoer.MeanField, {"layers": [True]}),
        (vmoer.MeanField, {"layers": 3}),
        (vmoer.MeanField, {"seed": -1}),
    ],
)
def test_settings_out_of_bounds_are_refused(config: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="|".join(settings)):
        config(**settings)
