"""The kernels by themselves on a GPU: microseconds of each shape, for the defaults in vmoer/kernels.

    python benchmarks/tune.py [--out FILE]

For each model's N: the heads' product in both layouts (h W' leaves the entries row by row, W h' entry by entry), then the
averaging kernel in every shape and layout, then the other kernels. `token-1x4` is the by-token kernel, one token a program,
four warps; `expert-64x4` the by-expert kernel (Cholesky posteriors alone), 64 tokens a program.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from vmoer import noise
from vmoer.bench.measure import captured, interleaved
from vmoer.kernels import cholesky, low_rank, quadratic, select, temperature

SIZES = {40: (1536, 8), 60: (2048, 4), 64: (2048, 6), 128: (2048, 8)}
FEW = [("token", 1, 2), ("token", 1, 4), ("token", 1, 8)]
MANY = [
    ("expert", 16, 1),
    ("expert", 16, 2),
    ("expert", 32, 1),
    ("expert", 32, 2),
    ("expert", 64, 4),
    ("expert", 64, 2),
]
TOKENS = [("token", 1, 1), ("token", 4, 1), ("token", 8, 1), ("token", 4, 2), ("token", 4, 4)]
POINTS = [("point", 4, 4), ("point", 8, 4), ("point", 16, 4), ("point", 8, 2), ("point", 4, 1), ("point", 2, 1)]


def microseconds(variants: dict[str, Any]) -> dict[str, float | str]:
    out: dict[str, float | str] = {}
    graphs = {}
    for name, run in variants.items():
        try:
            graphs[name] = captured(run)
        except Exception as error:
            out[name] = f"{type(error).__name__}"
    for name, values in interleaved(graphs, "cuda", 3, 20).items():
        out[name] = round(1e6 * statistics.median(values), 1)
    return out


def aligned(x_TH: torch.Tensor, weight_OH: torch.Tensor) -> torch.Tensor:
    width = -(-len(weight_OH) // 8) * 8
    return torch.mm(x_TH, weight_OH.mT, out=x_TH.new_empty(len(x_TH), width)[:, : len(weight_OH)])


def chol(n: int, tokens: int) -> dict[str, float | str]:
    hidden, k = SIZES[n]
    entries = n * (n + 1) // 2
    features_TH = torch.randn(tokens, hidden // 4, device="cuda", dtype=torch.bfloat16).relu()
    heads = 0.02 * torch.randn(n + entries, hidden // 4, device="cuda", dtype=torch.bfloat16)
    by_row, by_entry = features_TH @ heads.mT, (heads @ features_TH.mT).mT
    logits_TN = torch.randn(tokens, n, device="cuda")
    eps_SN = noise.sobol_normal(32, n, 0).bfloat16().cuda()
    ask = select.Ask(k, dtype=torch.bfloat16)
    variants: dict[str, Any] = {
        "product h W'": lambda: features_TH @ heads.mT,
        "product W h'": lambda: heads @ features_TH.mT,
    }
    variants["product h W', rows aligned"] = lambda: aligned(features_TH, heads)
    states_TD = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    backbone = 0.02 * torch.randn(hidden // 4, hidden, device="cuda", dtype=torch.bfloat16)
    both = 0.02 * torch.randn(hidden // 4 + n, hidden, device="cuda", dtype=torch.bfloat16)
    nothing = torch.zeros(hidden // 4, device="cuda", dtype=torch.bfloat16)
    variants["own logits"] = lambda: states_TD @ both[:n].mT
    variants["backbone, relu"] = lambda: torch.relu(states_TD @ backbone.mT)
    variants["backbone with relu"] = lambda: torch._addmm_activation(nothing, states_TD, backbone.mT)
    variants["own logits and backbone"] = lambda: states_TD @ both.mT
    for shape in FEW if tokens < 1024 else MANY:
        for layout, out in (("entry", by_entry),) if shape[0] == "expert" else (("row", by_row),):
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
    eps = {r: noise.sobol_normal(32, n + r, 0).bfloat16().cuda() for r in (0, 8)}
    keys = temperature.Keys((0, 3, 1), torch.arange(tokens, device="cuda"))
    x_T = torch.randn(tokens, device="cuda")
    ask = select.Ask(k, dtype=torch.bfloat16)
    variants: dict[str, Any] = {
        "torch.topk": lambda: torch.topk(logits_TN, k, dim=-1),
        "select": lambda: select.select(logits_TN, logits_TN, ask),
        "temper": lambda: temperature.temper(logits_TN, x_T, keys, bounds=(0.05, 10.0), ask=ask),
    }
    shapes = [("token", 1, 4), ("token", 1, 8)] if tokens < 1024 else POINTS
    for shape in shapes:
        variants[f"mean-field {shape[0]}-{shape[1]}x{shape[2]}"] = lambda s=shape: low_rank.average(
            logits_TN, log_sd_TN, None, eps[0], own_TN=logits_TN, ask=ask, shape=s
        )
    for shape in FEW[1:] if tokens < 1024 else TOKENS:
        variants[f"rank 8 {shape[0]}-{shape[1]}x{shape[2]}"] = lambda s=shape: low_rank.average(
            logits_TN, log_sd_TN, factor_TNR, eps[8], own_TN=logits_TN, ask=ask, shape=s
        )
    hidden = SIZES[n][0]
    states_TD = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    basis_RD = torch.linalg.qr(torch.randn(hidden, 128, device="cuda")).Q.mT.contiguous()
    for block in (64, 128):
        variants[f"novelty-{block}"] = lambda b=block: quadratic.novelty(
            states_TD, basis_RD, basis_RD[:, 0].abs().contiguous(), basis_RD[0, 0].abs(), b
        )
    return microseconds(variants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--experts", default=",".join(map(str, SIZES)))
    parser.add_argument("--tokens", default="64,16384")
    args = parser.parse_args()
    rows = []
    with torch.no_grad():
        for n in map(int, args.experts.split(",")):
            for tokens in map(int, args.tokens.split(",")):
                rows.append({"experts": n, "tokens": tokens, **chol(n, tokens), **others(n, tokens)})
                shown = [f"{name} {value}" for name, value in rows[-1].items() if name not in ("experts", "tokens")]
                print(f"\nN {n}, {tokens} tokens\n" + "; ".join(shown), flush=True)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
