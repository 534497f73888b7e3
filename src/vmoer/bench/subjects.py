"""What is timed: a model under each method, and the passes that are asked of it."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vmoer.bench.geometries import twin
from vmoer.bench.listing import Listing
from vmoer.bench.measure import Work
from vmoer.live.attach import attach, record
from vmoer.live.fitting import fit
from vmoer.live.variational import VariationalGate
from vmoer.routers import Config, Deterministic, Router, methods

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
CONTEXT = 1024  # tokens in the cache a decode step attends to
RANK = 128  # of novelty


def configurations(layers: Sequence[int] | Literal["all"] = "all") -> dict[str, Config]:
    """Every method that is trained, and the paper's listing. Those that sample weights take the paper's 35 samples."""
    networks: dict[str, Config] = {}
    weights: dict[str, Config] = {}
    kind: Any
    for key, kind in methods().items():
        if kind().trains == "network":
            networks[key] = kind(layers=layers)
        elif kind().trains == "weights":
            weights[key] = kind(layers=layers, samples=35)
    return networks | weights | {Listing.key: Listing(layers=layers)}


def is_slow(config: Config) -> bool:
    """Whether it takes several times as long as the others."""
    return config.trains == "weights" or isinstance(config, Listing)


def attached(model: nn.Module, config: Config) -> nn.Module:
    """The same weights with the method on them, in the state it would have after training: random heads, snapshots taken."""
    other = attach(twin(model), config)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    for gate in routers(other):
        method = gate.vmoer
        for parameter in method.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=DEVICE)
            parameter.data.add_(noise * 0.02 * parameter.shape[-1] ** -0.5)
        for _ in range(config.snapshots):
            for parameter in method.parameters():
                parameter.data.add_(torch.randn(parameter.shape, generator=generator, device=DEVICE) * 1e-3)
            method.collect()
        method.to(DTYPE)
    return other.eval().requires_grad_(False)


def routers(model: nn.Module) -> list[VariationalGate]:
    return [module for module in model.modules() if isinstance(module, VariationalGate)]


def floor(router: Router, tokens: int, ceilings: dict[str, float]) -> float | None:
    """Seconds below which no router of this kind can go: each stage at the machine's own rate or bandwidth, bfloat16.

    A stage reads its inputs and writes its outputs once; the products and the averaging are stages of their own. None where
    there is no inference network.
    """
    work = router.work()
    if work is None:
        return None
    outputs, averaging = work
    hidden, experts = router.gate.hidden_size, router.gate.num_experts
    answer = tokens * experts * 4

    def stage(count: float, traffic: float) -> float:
        return max(2 * count / ceilings["flops_per_second"], traffic / ceilings["bytes_per_second"])

    products = [(hidden, experts), (hidden, hidden // 4), (hidden // 4, outputs)]
    total = sum(stage(tokens * a * b, 2 * (tokens * (a + b) + a * b)) for a, b in products)
    return total + stage(tokens * averaging, 2 * tokens * outputs + 2 * answer)


def own_bytes(model: nn.Module) -> int:
    tensors = [x for gate in routers(model) for x in (*gate.vmoer.parameters(), *gate.vmoer.buffers())]
    return sum(x.numel() * x.element_size() for x in tensors)


def with_novelty(plain: nn.Module, layers: list[int]) -> nn.Module:
    model = attach(twin(plain), Deterministic(layers=layers)).eval().requires_grad_(False)
    fit(model, [{"input_ids": Prefill(plain, 4096 if DEVICE == "cuda" else 256).ids}], rank=RANK)
    return model


def recorded(model: nn.Module, run: Work) -> Work:
    """The same inside `vmoer.record`: signals are computed for every token."""

    def work() -> Tensor:
        with record(model):
            return run()

    return work


class FullCache:
    """A key-value cache of fixed length whose last slot is written again at every step: a decode step, over and over."""

    is_compileable = False

    def __init__(self, config: Any, batch: int) -> None:
        heads = config.num_key_value_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (batch, heads, CONTEXT, size)
        self.layers = [
            (torch.randn(shape, device=DEVICE, dtype=DTYPE), torch.randn(shape, device=DEVICE, dtype=DTYPE))
            for _ in range(config.num_hidden_layers)
        ]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        past_keys, past_values = self.layers[layer]
        past_keys[:, :, -1:] = keys
        past_values[:, :, -1:] = values
        return past_keys, past_values

    def get_seq_length(self, *_: Any) -> int:
        return CONTEXT - 1


class Prefill:
    def __init__(self, model: nn.Module, tokens: int) -> None:
        length = min(1024, tokens)
        generator = torch.Generator(device=DEVICE).manual_seed(tokens)
        vocabulary = model.config.vocab_size  # type: ignore[union-attr]
        self.ids = torch.randint(vocabulary, (tokens // length, length), generator=generator, device=DEVICE)  # type: ignore[arg-type]
        self.batch = len(self.ids)

    def of(self, model: nn.Module) -> Any:
        return lambda: model(input_ids=self.ids, use_cache=False, logits_to_keep=1).logits


class Decode:
    def __init__(self, model: nn.Module, batch: int) -> None:
        self.batch = batch
        self.cache = FullCache(model.config, batch)
        self.ids = torch.randint(model.config.vocab_size, (batch, 1), device=DEVICE)  # type: ignore[arg-type, union-attr]
        # rows at one position would share the noise that is keyed by it, and with it their experts
        self.positions = torch.arange(CONTEXT - batch, CONTEXT, device=DEVICE).unsqueeze(1)
        self.mask = torch.ones(batch, 1, 1, CONTEXT, dtype=torch.bool, device=DEVICE)

    def of(self, model: nn.Module) -> Any:
        return lambda: (
            model(
                input_ids=self.ids,
                attention_mask=self.mask,
                position_ids=self.positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
        )
