"""The attention of copies over a shared prompt, where it runs: on the GPU if there is one, else on the CPU."""

from types import SimpleNamespace

import pytest
import torch

from vmoer.inference.shared_prompt import _CURRENT, Copies, attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("padded", [False, True])
def test_attention(dtype: torch.dtype, padded: bool) -> None:
    """Prompts and copies against float64, for groups of heads, a ragged prompt and copies that fill no tile."""
    torch.manual_seed(0)
    b, h, g, m, t, d = 3, 2, 3, 5, 77, 64
    q, k, v = (torch.randn(b, n, t + m, d, device=DEVICE).to(dtype) for n in (h * g, h, h))
    mask_BT = torch.ones(b, t, dtype=torch.long, device=DEVICE)
    if padded:
        mask_BT[0, :20] = 0
        mask_BT[2, :76] = 0
    token = _CURRENT.set(Copies(m, t, mask_BT if padded else None, mask_BT.device))
    try:
        module = SimpleNamespace(layer_idx=0, num_key_value_groups=g, is_causal=True)
        out, _ = attention(module, q, k, v, None, scaling=0.3)  # type: ignore[arg-type]
    finally:
        _CURRENT.reset(token)
    wide = [x.double().repeat_interleave(n, 1) for x, n in ((q, 1), (k, g), (v, g))]
    sees = torch.ones(t + m, t + m, dtype=torch.bool, device=DEVICE).tril()
    sees[t:, t:] = torch.eye(m, dtype=torch.bool)
    real = torch.cat([mask_BT, torch.ones_like(mask_BT[:, :m])], 1).bool()
    scores = (0.3 * wide[0] @ wide[1].mT).masked_fill(~(sees & real[:, None, None]), float("-inf"))
    expected = (torch.softmax(scores, -1).nan_to_num() @ wide[2]).transpose(1, 2)
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double()[real], expected[real], atol=limit, rtol=limit)
