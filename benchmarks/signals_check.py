"""Whether what is read is right on this device: a line for each check, `ok` or `FAILS` first.

Kernels against float64; a router's replayed graph against its kernels launched one by one, over random shapes; a recorded pass
under a CUDA graph and compiled against the eager one; PyTorch's own checks of the operator, captured and padded.
"""

import random
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

import vmoer
from vmoer import gates
from vmoer.bench.geometries import SMALL
from vmoer.bench.measure import captured
from vmoer.bench.reading import fitted
from vmoer.bench.subjects import DEVICE, recorded, routers
from vmoer.inference import operator
from vmoer.live import capturing
from vmoer.live.attach import routers_of
from vmoer.numerics import kernels
from vmoer.numerics.gaussians import Cholesky, Diagonal, Factored, Gaussian

Check = Callable[[], str]
KEYS = ("vglr-fc", "vglr-mf", "vglr-lr", "vtsr", "map")
SHAPES = 200


def error(ours: Tensor, theirs: Tensor) -> float:
    """The largest error, relative to the largest number."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-30))


def spread_kernels() -> str:
    worst = 0.0
    for tokens, n in ((1, 40), (37, 60), (3000, 40), (16384, 40), (4096, 128)):
        mean_TN = torch.randn(tokens, n, device=DEVICE)
        entries = n * (n + 1) // 2
        for dtype in (torch.bfloat16, torch.float32):
            raw_TC = (0.3 * torch.randn(entries, tokens, device=DEVICE)).to(dtype).mT
            heads = (0.3 * torch.randn(tokens, 9 * n, device=DEVICE)).to(dtype)
            for q, wide in (
                (Cholesky(mean_TN, raw_TC, 0.7), Cholesky(mean_TN.double(), raw_TC.double(), 0.7)),
                (Cholesky(mean_TN, raw_TC.contiguous(), 0.7), Cholesky(mean_TN.double(), raw_TC.double(), 0.7)),
                (Diagonal(mean_TN, heads[:, :n], 2.0), Diagonal(mean_TN.double(), heads[:, :n].double(), 2.0)),
                (
                    Factored(mean_TN, heads[:, :n], heads[:, n:].unflatten(-1, (n, 8))),
                    Factored(mean_TN.double(), heads[:, :n].double(), heads[:, n:].double().unflatten(-1, (n, 8))),
                ),
            ):
                assert isinstance(q, Gaussian)
                found = kernels.entropy_and_trace(mean_TN, q)
                assert found is not None, "the kernel did not answer"
                p_TN = mean_TN.double().softmax(-1)
                worst = max(worst, error(found[0], torch.special.entr(p_TN).sum(-1)), error(found[1], wide.trace()))
                assert worst < 1e-5, f"{type(q).__name__} {tokens} x {n} {dtype}: {worst:.1e}"
    return f"entropy and trace: {worst:.1e} off float64"


def novelty_kernel() -> str:
    worst = 0.0
    for tokens, dim, rank in ((1, 1536, 128), (300, 2048, 128), (16384, 1536, 128), (5000, 2048, 256), (77, 576, 64)):
        root_RD = torch.randn(rank, dim, device=DEVICE) / dim
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            u_TD = torch.randn(tokens, dim, device=DEVICE).to(dtype)
            expected = (u_TD.double() @ root_RD.double().mT).square().sum(-1)
            for split in (None, kernels.halves(root_RD)):
                found = kernels.novelty(u_TD, root_RD, split)
                assert found is not None, "the kernel did not answer"
                worst = max(worst, error(found, expected))
                assert worst < 1e-3, f"{tokens} x {dim}, rank {rank}, {dtype}: {worst:.1e}"
    return f"novelty: {worst:.1e} off float64"


def replays() -> str:
    """A router asked often enough is captured; the same states then give the same answer and the same signals."""
    draw, shapes, taken = random.Random(0), 0, 0
    plain = SMALL["small-granite"].build(DEVICE, torch.bfloat16)
    for key in KEYS:
        model = fitted(plain, key, [1, 4])
        gate = routers(model)[0]
        for _ in range(SHAPES // len(KEYS)):
            tokens = draw.choice([1, draw.randint(2, 64), draw.randint(65, capturing.MOST)])
            states = [torch.randn(tokens, 256, device=DEVICE, dtype=torch.bfloat16) for _ in range(6)]
            found = []
            for capturing.enabled in (False, True):
                outs = []
                for u_TD in states:
                    with vmoer.record(model) as rec:
                        out = gate(u_TD)
                    entry = rec.passes[-1][1][gate.vmoer_layer]
                    outs.append((*out, entry.experts_TK, *[entry.signals[name] for name in sorted(entry.signals)]))
                found.append(outs)
            for off, on in zip(*found, strict=True):
                for theirs, ours in zip(off, on, strict=True):
                    assert torch.equal(ours, theirs) or error(ours, theirs) < 1e-5, f"{key}, {tokens} tokens"
            kept = capturing._LOCAL.kept[gate.vmoer].takes
            taken += any(take is not None and key_[1][0] == tokens for key_, take in kept.items())
            shapes += 1
    assert taken == shapes, f"{taken} of {shapes} shapes were captured"
    return f"replayed routers: {shapes} shapes, equal"


def watched(model: Any, plain: Any) -> list[Tensor]:
    """Where every gate of the model, attached or not, leaves its logits and experts, layer after layer."""
    left: list[Tensor] = []
    for found, own in zip(gates.find(model), gates.find(plain), strict=True):
        gate = gates.Gate.probe(own)

        def keep(module: Any, args: Any, out: Any, gate: Any = gate) -> None:
            left.extend((gate.logits(out), gate.experts(out)))

        found.router.register_forward_hook(keep)
    return left


def same_until(ours: list[Tensor], theirs: list[Tensor], rows: int) -> tuple[list[Tensor], int]:
    """Which tokens [B, T] are alike before each layer, and how many choices differ. Where an earlier layer chose other experts a
    token is another one from there on, and so are those behind it in its row. Such a choice must be a tie within the error."""
    other_BT = torch.zeros(rows, len(ours[0]) // rows, dtype=torch.bool, device=DEVICE)
    alike, ties = [], 0
    for place in range(0, len(ours), 2):
        logits_TN, chosen_TK = theirs[place], theirs[place + 1]
        top_TN = logits_TN.double().sort(-1, descending=True).values
        k = chosen_TK.shape[1]
        margin_BT = (top_TN[:, k - 1] - top_TN[:, k]).view_as(other_BT)
        off_BT = (ours[place].double() - logits_TN.double()).abs().amax(-1).view_as(other_BT)
        differs_BT = (ours[place + 1].sort(-1).values != chosen_TK.sort(-1).values).any(-1).view_as(other_BT)
        alike.append(~other_BT)
        assert not (differs_BT & ~other_BT & (margin_BT > 2 * off_BT)).any(), (
            f"other experts in layer {place // 2}, no tie"
        )
        ties += int((differs_BT & ~other_BT).sum())
        other_BT = (other_BT | differs_BT).cummax(1).values
    return alike, ties


def graphs() -> str:
    """Recorded passes of a float32 model as one CUDA graph. The model's own sums may have another order there, which decides a
    tie between experts otherwise: tokens are compared up to the first such tie in their row, and it must be one."""
    worst, draw, ties, compared, whole = 0.0, random.Random(1), 0, 0, 0
    torch.use_deterministic_algorithms(True, warn_only=True)
    plain: Any = SMALL["small-granite"].build(DEVICE, torch.float32)
    plain.set_experts_implementation("batched_mm")  # the grouped product asks the host for its sizes in float32
    for key in KEYS:
        model: Any = fitted(plain, key, [1, 4])
        for router in routers_of(model).values():
            router.float()
        left = watched(model, plain)
        for _ in range(SHAPES // len(KEYS)):
            ids = torch.randint(1000, (draw.randint(1, 4), draw.randint(1, 300)), device=DEVICE)
            kept: dict[str, Any] = {}

            def work(
                ids: Tensor = ids, kept: dict[str, Any] = kept, model: Any = model, left: list[Tensor] = left
            ) -> Tensor:
                left.clear()
                with vmoer.record(model) as rec:
                    out: Tensor = model(input_ids=ids, use_cache=False).logits
                kept["rec"] = rec
                return out

            work()
            eager, chose = kept["rec"].signals, list(left)
            replay = captured(work)
            replay()
            torch.cuda.synchronize()
            alike, found = same_until(left, chose, len(ids))
            ties += found
            for name, theirs in eager.items():
                for at, layer in enumerate((1, 4)):
                    of = alike[layer]
                    compared, whole = compared + int(of.sum()), whole + of.numel()
                    if of.any():
                        worst = max(worst, error(kept["rec"].signals[name][at][of], theirs[at][of]))
            assert worst < 1e-5, f"{key}, {tuple(ids.shape)}: {worst:.1e}"
    torch.use_deterministic_algorithms(False)
    assert compared > 0.95 * whole, f"only {compared} of {whole} values could be compared"
    return (
        f"recorded passes under CUDA graphs, {SHAPES} shapes: {worst:.1e} off the eager ones; {ties} choices were ties, "
        f"{compared / whole:.2%} of the values stand before one"
    )


def compiled() -> str:
    """A float32 model under mode="reduce-overhead": passes of one record, and records one after the other."""
    worst, graphs = 0.0, []
    plain: Any = SMALL["small-granite"].build(DEVICE, torch.float32)
    plain.set_experts_implementation("batched_mm")  # the grouped product asks the host for its sizes in float32
    for key in ("vglr-fc", "vtsr"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model: Any = fitted(plain, key, [1, 4])
        model.set_experts_implementation("batched_mm")  # as transformers does where it compiles
        for router in routers_of(model).values():
            router.float()
        fast: Any = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        ids = torch.randint(1000, (4, 2, 40), device=DEVICE)
        for _ in range(3):
            with vmoer.record(fast) as rec:
                for part in ids:
                    fast(input_ids=part, use_cache=False)
            with vmoer.record(model) as eager:
                for part in ids:
                    model(input_ids=part, use_cache=False)
            same = (rec.experts == eager.experts).all(-1)
            worst = max(worst, max(error(rec.signals[n][same], eager.signals[n][same]) for n in eager.signals))
            assert same.float().mean() > 0.99, f"{key}: {same.float().mean():.3f} of the experts are the same"
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert set(graphs) == {1}, f"compiled {graphs} times"
    assert worst < 1e-3, f"{worst:.1e} off"
    return f"compiled and recorded: one graph, {worst:.1e} off the eager signals where the experts are the same"


def compiled_narrow() -> str:
    """The same in bfloat16, where the kernels for few tokens run. Compiled code rounds the model's own states elsewhere, so
    signals are compared by their median error."""
    worst = 0.0
    plain: Any = SMALL["small-granite"].build(DEVICE, torch.bfloat16)
    for key in KEYS:
        torch._dynamo.reset()
        model: Any = fitted(plain, key, [1, 4])
        model.set_experts_implementation("batched_mm")  # as transformers does where it compiles
        fast: Any = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        for shape in ((1, 1), (2, 1), (2, 40)):
            ids = torch.randint(1000, (4, *shape), device=DEVICE)
            found = []
            for one in (fast, model):
                with vmoer.record(one, signals="all") as rec:
                    for part in ids:
                        one(input_ids=part, use_cache=False)
                found.append(rec.signals)
            for name, theirs in found[1].items():
                off = (found[0][name] - theirs).abs() / theirs.abs().clamp_min(1e-6)
                worst = max(worst, float(off.median()))
        assert worst < 0.03, f"{key}: {worst:.1e}"
    return f"compiled and recorded in bfloat16: {worst:.1e} off the eager signals, a median"


def operators() -> str:
    """opcheck, capture and padding of `torch.ops.vmoer.route` in each dtype."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        plain = SMALL["small-granite"].build(DEVICE, dtype)
        model = fitted(plain, "vglr-fc", [1])
        theirs = routers_of(model)[1]
        gate = operator.logits_gate("softmax", 40, 8, 256)
        ours = vmoer.FullCovariance().router(vmoer.FullCovariance(), gate, None, 1, torch.device(DEVICE))
        ours.novelty_root_RD = theirs.novelty_root_RD
        ours.load_state_dict({name: x.float() for name, x in theirs.state_dict().items()})
        operator.forget()
        operator.host("checked", ours, None, dtype)
        u_TD = torch.randn(33, 256, device=DEVICE).to(dtype)
        logits_TN = torch.randn(33, 40, device=DEVICE).to(dtype)
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        found = torch.library.opcheck(torch.ops.vmoer.route.default, (u_TD, logits_TN, "checked"), test_utils=tests)
        assert set(found.values()) == {"SUCCESS"}, found
        eager = torch.ops.vmoer.route(u_TD, logits_TN, "checked")
        kept: dict[str, Any] = {}

        def work(u: Tensor = u_TD, logits: Tensor = logits_TN, kept: dict[str, Any] = kept) -> None:
            kept["out"] = torch.ops.vmoer.route(u, logits, "checked")

        captured(work)()
        torch.cuda.synchronize()
        padded = torch.full((64, 256), float("nan"), device=DEVICE, dtype=dtype)
        padded[:33] = u_TD
        wide = torch.full((64, 40), float("nan"), device=DEVICE, dtype=dtype)
        wide[:33] = logits_TN
        for other in (kept["out"], torch.ops.vmoer.route(padded, wide, "checked")):
            for a, b in zip(other, eager, strict=True):
                assert error(a[:33], b) < (1e-5 if dtype == torch.float32 else 1e-2), f"{dtype}: not the same"
    operator.forget()
    return "the operator: opcheck, captured, and beside padding of NaN, in three dtypes"


LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")


def calls(work: Callable[[], Any]) -> int:
    """What the host hands to the device in one run."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(capturing.SIGHTS + 2):
        work()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if any(name in event.key for name in LAUNCHES))


def launches() -> str:
    """How many launches a router adds to a layer, captured and (in brackets) kernel by kernel: attached, recorded."""
    plain, layers = SMALL["small-granite"].build(DEVICE, torch.bfloat16), [1, 4]
    ids, said = torch.randint(1000, (1, 64), device=DEVICE), []
    base = calls(lambda: plain(input_ids=ids, use_cache=False))
    for key in KEYS:
        model = fitted(plain, key, layers)

        def work(model: Any = model) -> Any:
            return model(input_ids=ids, use_cache=False)

        counts = []
        for capturing.enabled in (True, False):
            counts.append([(calls(run) - base) / len(layers) for run in (work, recorded(model, work))])
        shown = [f"{on:+.0f} ({off:+.0f})" for on, off in zip(*counts, strict=True)]
        said.append(f"{key} {', '.join(shown)}")
    capturing.enabled = True
    return f"launches a layer beside the plain router's, attached, recorded: {'; '.join(said)}"


def run(say: Callable[[str], None]) -> list[str]:
    # transformers looks for packed rows on the host, which would forbid a graph; there are none here
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    checks: list[Check] = [
        spread_kernels,
        novelty_kernel,
        replays,
        graphs,
        operators,
        launches,
        compiled,
        compiled_narrow,
    ]
    lines = []
    for check in checks:
        start = time.perf_counter()
        try:
            lines.append(f"ok    {check()}")
        except Exception as reason:
            traceback.print_exc()
            lines.append(f"FAILS {check.__name__}: {type(reason).__name__}: {reason}".splitlines()[0][:300])
        say(f"{lines[-1]}  ({time.perf_counter() - start:.0f} s)")
    capturing.enabled = True
    return lines
