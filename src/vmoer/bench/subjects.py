"""What is timed: a model under each method, and the passes that are asked of it."""

from typing import Any

import torch
from torch import Tensor, nn

import vmoer
from vmoer.bench.geometries import twin
from vmoer.bench.listing import Listing
from vmoer.bench.measure import Work
from vmoer.bench.router import routers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
CONTEXT = 1024  # tokens in the cache a decode step attends to
RANK = 128  # of novelty


def configurations(layers: list[int]) -> dict[str, Any]:
    return {
        "vglr-mf": vmoer.MeanField(layers=layers),
        "vglr-fc": vmoer.FullCovariance(layers=layers),
        "vglr-lr": vmoer.LowRank(layers=layers),
        "vtsr": vmoer.VariationalTemperature(layers=layers),
        "mcdr": vmoer.MCDropout(layers=layers, samples=35),
        "listing": Listing(layers=layers, samples=35),
        "swag": vmoer.SWAG(layers=layers, samples=35),
    }


def attached(model: nn.Module, config: Any) -> nn.Module:
    """The same weights with the method on them, in the state it would have after training: random heads, snapshots taken."""
    other = vmoer.attach(twin(model), config)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    for gate in routers(other):
        method = gate.vmoer
        for parameter in method.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=DEVICE)
            parameter.data.add_(noise * 0.02 * parameter.shape[-1] ** -0.5)
        if hasattr(method, "collect"):
            for _ in range(config.rank):
                method.delta.data.add_(torch.randn(method.delta.shape, generator=generator, device=DEVICE) * 1e-3)
                method.collect()
        method.to(DTYPE)
    return other.eval().requires_grad_(False)


def own_bytes(model: nn.Module) -> int:
    tensors = [x for gate in routers(model) for x in (*gate.vmoer.parameters(), *gate.vmoer.buffers())]
    return sum(x.numel() * x.element_size() for x in tensors)


def with_novelty(plain: nn.Module, layers: list[int]) -> nn.Module:
    model = vmoer.attach(twin(plain), vmoer.Deterministic(layers=layers)).eval().requires_grad_(False)
    vmoer.fit(model, [{"input_ids": Prefill(plain, 4096 if DEVICE == "cuda" else 256).ids}], rank=RANK)
    return model


def recorded(model: nn.Module, run: Work) -> Work:
    """The same inside `vmoer.record`: signals are computed for every token."""

    def work() -> Tensor:
        with vmoer.record(model):
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
