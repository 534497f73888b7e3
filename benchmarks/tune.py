"""The kernels by themselves on a GPU: microseconds of each shape, for the defaults in vmoer/numerics/kernels.

    python benchmarks/tune.py [--out FILE]

For each model's N: torch's own Top-K; the heads' product in both layouts (h W' leaves the entries row by row, W h' entry by
entry); then the averaging kernels in every shape. `token-1x4` is the by-token kernel, one token a program, four warps;
`expert-64x4` the by-expert kernel (Cholesky posteriors alone), 64 tokens a program.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vmoer.bench.measure import Work, captured, interleaved
from vmoer.files import write_json
from vmoer.numerics import noise
from vmoer.numerics.kernels import cholesky, low_rank, select, temperature

SIZES = {40: (1536, 8), 60: (2048, 4), 64: (2048, 6), 128: (2048, 8)}
"""Hidden size and chosen experts by the number of experts."""
FEW = [("token", 1, 2), ("token", 1, 4), ("token", 1, 8)]
EXPERTS = [("expert", tokens, warps) for tokens, warps in ((16, 1), (16, 2), (32, 1), (32, 2), (64, 2), (64, 4))]
TOKENS = [("token", tokens, warps) for tokens, warps in ((1, 1), (4, 1), (8, 1), (4, 2), (4, 4))]
POINTS = [("point", points, warps) for points, warps in ((4, 4), (8, 4), (16, 4), (8, 2), (4, 1), (2, 1))]


def variants(n: int, tokens: int) -> dict[str, Work]:
    hidden, k = SIZES[n]
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    few = tokens < 1024
    ask = select.Ask(k, dtype=torch.bfloat16)
    logits_TN = torch.randn(tokens, n, device="cuda")
    log_sd_TN, factor_TNR = 0.1 * torch.randn(tokens, n, **half), 0.1 * torch.randn(tokens, n, 8, **half)
    features_TH = torch.randn(tokens, hidden // 4, **half).relu()
    heads = 0.02 * torch.randn(n + n * (n + 1) // 2, hidden // 4, **half)
    by_row, by_entry = features_TH @ heads.mT, (heads @ features_TH.mT).mT
    eps = {r: noise.sobol_normal(32, n + r, 0).bfloat16().cuda() for r in (0, 8)}
    keys, x_T = temperature.Keys((0, 3, 1), torch.arange(tokens, device="cuda")), torch.randn(tokens, device="cuda")
    out: dict[str, Work] = {
        "torch.topk": lambda: torch.topk(logits_TN, k, dim=-1),
        "product h W'": lambda: features_TH @ heads.mT,
        "product W h'": lambda: heads @ features_TH.mT,
        "temper": lambda: temperature.temper(logits_TN, x_T, keys, bounds=(0.05, 10.0), ask=ask),
    }
    common: dict[str, Any] = {"own_TN": logits_TN, "ask": ask}
    for shape in FEW if few else EXPERTS:
        made = by_row if shape[0] == "token" else by_entry
        out[f"cholesky {_name(shape)}"] = partial(
            cholesky.average, logits_TN, made[:, n:], eps[0], shift_TN=made[:, :n], shape=shape, **common
        )
    for shape in FEW[1:] if few else POINTS:
        out[f"mean-field {_name(shape)}"] = partial(
            low_rank.average, logits_TN, log_sd_TN, None, eps[0], shape=shape, **common
        )
    for shape in FEW[1:] if few else TOKENS:
        out[f"rank 8 {_name(shape)}"] = partial(
            low_rank.average, logits_TN, log_sd_TN, factor_TNR, eps[8], shape=shape, **common
        )
    return out


def _name(shape: tuple[str, int, int]) -> str:
    return f"{shape[0]}-{shape[1]}x{shape[2]}"


def microseconds(works: dict[str, Work]) -> dict[str, float | str]:
    out: dict[str, float | str] = {}
    graphs = {}
    for name, work in works.items():
        try:
            graphs[name] = captured(work)
        except Exception as error:  # a shape that this GPU does not take
            out[name] = type(error).__name__
    times = interleaved(graphs, "cuda", 3, 20)
    return out | {name: round(1e6 * statistics.median(values), 1) for name, values in times.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out, rows = parser.parse_args().out, []
    for n in SIZES:
        for tokens in (64, 16384):
            found = microseconds(variants(n, tokens))
            rows.append({"experts": n, "tokens": tokens, **found})
            print(f"\nN {n}, {tokens} tokens\n" + "; ".join(f"{name} {us}" for name, us in found.items()), flush=True)
    if out is not None:
        write_json(out, rows)


if __name__ == "__main__":
    main()
