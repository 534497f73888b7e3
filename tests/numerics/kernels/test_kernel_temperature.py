"""Oracle: vmoer.numerics.noise for the hash and the noise, float64 and torch.topk for the rest."""

import kernel_references as references
import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import DEVICE, Case, assert_same_experts

from vmoer.numerics import noise
from vmoer.numerics.kernels import Ask, Keys, select, temperature
from vmoer.numerics.kernels._tiles import mix

POSITIONS = torch.tensor([0, 1, 2, 4095, 70001])
ROWS = torch.tensor([3, 0, 2**31 + 5, 7, 7])
KEYS = {
    "inference": Keys((7, 3, 12), POSITIONS),
    "passes": Keys((7, 2), POSITIONS, ROWS, (12,)),
    "training": Keys((2**40 + 7, 1, 1000, 12), POSITIONS, ROWS),
}


def _on_device(keys: Keys) -> Keys:
    first = None if keys.first_T is None else keys.first_T.to(DEVICE)
    return keys._replace(position_T=keys.position_T.to(DEVICE), first_T=first)


@triton.jit
def _hash_kernel(key_ptr, out_ptr, state, B: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, B)
    start = tl.zeros([B], tl.uint32) + state.to(tl.uint32, bitcast=True)
    tl.store(out_ptr + i, mix(start, tl.load(key_ptr + i).to(tl.uint32)).to(tl.int64))


@triton.jit
def _gumbel_kernel(state_ptr, out_ptr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, B)
    tl.store(out_ptr + i, temperature.gumbel_of(tl.load(state_ptr + i).to(tl.uint32)))


@pytest.mark.parametrize("before", [(), (7,), (2**33 + 5, 3, 12)])
def test_hash_is_bit_identical(before: tuple[int, ...]) -> None:
    keys = torch.tensor([0, 1, 2, 3, 2**31, 2**32 - 1, 2**40 + 9, 123456789]).to(DEVICE)
    out = torch.empty(8, dtype=torch.int64, device=DEVICE)
    _hash_kernel[(1,)](keys, out, temperature._signed(int(noise.combine(*before))), B=8)
    assert torch.equal(out, noise.hash32(*before, keys))


def test_gumbel_to_the_ends_of_its_range() -> None:
    """Against float64 logarithms of the same uniform, which is what vmoer.numerics.noise computes in float32."""
    bits = torch.tensor(
        [0, 1, 2, 3, 2**22, 3 * 2**21 - 1, 3 * 2**21, 2**23 - 4, 2**23 - 3, 2**23 - 2, 2**23 - 1, 5, 9, 77, 1, 0]
    )
    state = (bits << 9).to(DEVICE)
    out = torch.empty(16, dtype=torch.float32, device=DEVICE)
    _gumbel_kernel[(1,)](state, out, B=16)
    uniform = (bits.double() + 0.5) * 2.0**-23
    expected = -torch.log(-torch.log(uniform))
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("experts", [4, 40, 129])
def test_perturbed_logits(name: str, experts: int) -> None:
    keys = _on_device(KEYS[name])
    logits_TN = Case(5, experts).mean_TN
    x_T = torch.tensor([-30.0, -1.0, 0.0, 3.0, 40.0], device=DEVICE)
    got = temperature.temper(logits_TN, x_T, keys, bounds=(0.05, 10.0))
    expected = references.temper(logits_TN, x_T, keys, bounds=(0.05, 10.0))
    assert abs(got.temperature_T[2].item() - 1) < 1e-6
    for ours, theirs in zip(got[:3], expected[:3], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [8, 100, 600])
@pytest.mark.parametrize("tokens_a_program", [1, 4])
def test_last_layer(dtype: torch.dtype, hidden: int, tokens_a_program: int) -> None:
    """Features and the MLP's last layer in place of what it says."""
    keys = _on_device(KEYS["inference"])
    generator = torch.Generator().manual_seed(hidden)
    logits_TN = torch.randn(5, 40, generator=generator).to(DEVICE)
    features_TH = torch.randn(5, hidden, generator=generator).relu().to(DEVICE, dtype)
    weight_H, bias = (torch.randn(n, generator=generator).to(DEVICE, dtype) * 0.1 for n in (hidden, 1))
    x_T = (features_TH.double() @ weight_H.double() + bias.double()).float()
    more = {"bounds": (0.05, 10.0), "tokens_a_program": tokens_a_program}
    got = temperature.temper(logits_TN, features_TH, keys, head=(weight_H, bias), **more)  # type: ignore[arg-type]
    expected = temperature.temper(logits_TN, x_T, keys, **more)  # type: ignore[arg-type]
    for ours, theirs in zip(got[:3], expected[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("k", "normalise"), [(1, False), (8, True), (16, False)])
@pytest.mark.parametrize(("tokens_a_program", "own"), [(1, False), (4, False), (4, True)])
def test_choice_at_given_temperatures(k: int, normalise: bool, tokens_a_program: int, own: bool) -> None:
    """Chosen by the perturbed logits, weighed by the unperturbed ones, scaled or the model's own."""
    tokens = 7
    logits_TN = Case(tokens, 40).mean_TN
    temperature_T = torch.linspace(0.2, 5, tokens, device=DEVICE)
    keys = Keys((7, 3, 12), torch.arange(tokens, device=DEVICE))
    ask = Ask(k, normalise)
    got = temperature.temper(logits_TN, temperature_T, keys, own=own, ask=ask, tokens_a_program=tokens_a_program)
    expected = references.temper(logits_TN, temperature_T, keys, own=own)
    assert got.weights_TK is not None
    assert got.indices_TK is not None
    assert_same_experts(got.indices_TK, expected.select_TN, 1e-4)
    weights_TK = expected.scaled_TN.softmax(-1).gather(-1, got.indices_TK)
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    torch.testing.assert_close(got.weights_TK.double(), weights_TK, rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", [(1, 1), (8, 4)])
@pytest.mark.parametrize("experts", [4, 60])
def test_selection_by_itself(shape: tuple[int, int], experts: int) -> None:
    case = Case(9, experts)
    by_TN = case.mean_TN.flip(-1)
    ask = Ask(4, True, 0.5)
    got, expected = (
        select.select(by_TN, case.mean_TN, ask, shape),
        references.select(by_TN, case.mean_TN, ask),
    )
    assert got.weights_TK is not None
    assert got.indices_TK is not None
    assert expected.weights_TK is not None
    assert expected.indices_TK is not None
    assert torch.equal(got.indices_TK, expected.indices_TK)
    torch.testing.assert_close(got.weights_TK.double(), expected.weights_TK, rtol=1e-5, atol=0)
