"""The kernels by themselves on a GPU: microseconds of each shape, for the defaults in vmoer/kernels.

    python benchmarks/tune.py [--out FILE]

For each model's N: the heads' product in both layouts (h W' leaves the entries row by row, W h' entry by entry), then the
averaging kernel in every shape and layout, then the other kernels. `token-1x4` is the by-token kernel, one token a program,
four warps; `expert-64x4` the by-expert kernel, 64 tokens a program.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from measure import captured, interleaved

from vmoer import noise
from vmoer.kernels import cholesky, diagonal, low_rank, select, temperature

SIZES = {40: (1536, 8), 60: (2048, 4), 64: (2048, 6), 128: (2048, 8)}
SHAPES = [("token", 1, 2), ("token", 1, 4), ("token", 1, 8), ("token", 4, 4), ("token", 8, 4)]
SHAPES += [("expert", 16, 1), ("expert", 32, 2), ("expert", 64, 4), ("expert", 128, 4), ("expert", 128, 8)]


def microseconds(variants: dict[str, Any]) -> dict[str, float | str]:
    out: dict[str, float | str] = {}
    graphs = {}
    for name, run in variants.items():
        try:
            graphs[name] = captured(run)
        except Exception as error:
            out[name] = f"{type(error).__name__}"
    for name, values in interleaved(graphs, "cuda", 5, 20).items():
        out[name] = round(1e6 * statistics.median(values), 1)
    return out


def chol(n: int, tokens: int) -> dict[str, float | str]:
    hidden, k = SIZES[n]
    entries = n * (n + 1) // 2
    features_TH = torch.randn(tokens, hidden // 4, device="cuda", dtype=torch.bfloat16).relu()
    heads = 0.02 * torch.randn(n + entries, hidden // 4, device="cuda", dtype=torch.bfloat16)
    by_row, by_entry = features_TH @ heads.mT, (heads @ features_TH.mT).mT
    logits_TN = torch.randn(tokens, n, device="cuda")
    eps_SN = noise.sobol_normal(32, n, 0).cuda()
    ask = select.Ask(k, dtype=torch.bfloat16)
    variants: dict[str, Any] = {
        "product h W'": lambda: features_TH @ heads.mT,
        "product W h'": lambda: heads @ features_TH.mT,
    }
    for shape in SHAPES:
        if shape[0] == "expert" and (tokens < 1024 or n > 64):
            continue
        for layout, out in (("row", by_row), ("entry", by_entry)):
            shift_TN, raw_TC = out[:, :n], out[:, n:]
            variants[f"{shape[0]}-{shape[1]}x{shape[2]} {layout}"] = lambda s=shape, a=shift_TN, r=raw_TC: (
                cholesky.average(logits_TN, r, eps_SN, shift_TN=a, own_TN=logits_TN, ask=ask, shape=s)
            )
    return microseconds(variants)


def others(n: int, tokens: int) -> dict[str, float | str]:
    k = SIZES[n][1]
    logits_TN = torch.randn(tokens, n, device="cuda")
    log_sd_TN = 0.1 * torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16)
    factor_TNR = 0.1 * torch.randn(tokens, n, 8, device="cuda", dtype=torch.bfloat16)
    eps = {r: noise.sobol_normal(32, n + r, 0).cuda() for r in (0, 8)}
    keys = temperature.Keys((0, 3, 1), torch.arange(tokens, device="cuda"))
    x_T = torch.randn(tokens, device="cuda")
    ask = select.Ask(k, dtype=torch.bfloat16)
    variants: dict[str, Any] = {
        "torch.topk": lambda: torch.topk(logits_TN, k, dim=-1),
        "select": lambda: select.select(logits_TN, logits_TN, ask),
        "temper": lambda: temperature.temper(logits_TN, x_T, keys, bounds=(0.05, 10.0), ask=ask),
    }
    for block in (1, 4, 16, 32):
        variants[f"diagonal-{block}"] = lambda b=block: diagonal.average(
            logits_TN, log_sd_TN, eps[0], own_TN=logits_TN, ask=ask, tokens_a_program=b
        )
    for block in (1, 4, 16):
        variants[f"low_rank-{block}"] = lambda b=block: low_rank.average(
            logits_TN, log_sd_TN, factor_TNR, eps[8], own_TN=logits_TN, ask=ask, tokens_a_program=b
        )
    return microseconds(variants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--experts", default=",".join(map(str, SIZES)))
    args = parser.parse_args()
    rows = []
    with torch.no_grad():
        for n in map(int, args.experts.split(",")):
            for tokens in (1, 64, 4096, 16384):
                rows.append({"experts": n, "tokens": tokens, **chol(n, tokens), **others(n, tokens)})
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(f"\nN {row['experts']}, {row['tokens']} tokens")
        print("; ".join(f"{name} {value}" for name, value in row.items() if name not in ("experts", "tokens")))


if __name__ == "__main__":
    main()
