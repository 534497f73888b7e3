"""Where VTSR should start: experts sampled at one temperature in every layer of the embedded model, measured on validation.

python benchmarks/demo_temperature.py [--passes 4]      ten minutes on one core

Nothing is trained: these are the states that stage 2 starts from, and keeps where training does not improve on them. Against
map, for three seeds of the noise: accuracy, and the paired difference of NLL with its interval, in one pass and averaged over
`--passes` whole passes; then the difference of Jaccard under noise on 200 prompts, over seeds. `scaled` weighs by l / T as the
paper does, `own` by l, which changes the weights and not the choice of experts.
"""

import argparse
from typing import Any

import numpy as np
import torch

import vmoer
from vmoer import metrics as m
from vmoer import tasks
from vmoer.live.attach import attach, attachment_of, detach
from vmoer.live.brittleness import brittleness
from vmoer.models import Opened, open_model
from vmoer.routers import Config, Deterministic
from vmoer.studies import stability
from vmoer.tasks.batches import padded
from vmoer.tasks.prompt import encode
from vmoer.training.data import encode_questions
from vmoer.training.objective import evaluate
from vmoer.training.workers import Workers

STARTS = [("scaled", t) for t in (0.3, 1.0)] + [("own", t) for t in (0.1, 0.15, 0.2, 0.3, 0.5)]
SEEDS = (0, 1, 2)


def jaccard(opened: Opened, config: Config, seed: int) -> Any:
    """By noise level and prompt, [G, R], averaged over layers and a prompt's tokens."""
    asked = tasks.load("demo", "validation")[: stability.QUESTIONS]
    prompts = encode(opened.tokenizer, asked, 2048)
    batches = [padded(prompts[i : i + 32], next(opened.model.parameters()).device) for i in range(0, len(prompts), 32)]
    attach(opened.model, config)
    found = brittleness(opened.model, batches, gammas=stability.GAMMAS, seed=seed)
    detach(opened.model)
    return np.stack([np.bincount(found.rows_T, x) / np.bincount(found.rows_T) for x in found.jaccard_LGT.mean(0)])


def stabilities(opened: Opened) -> None:
    """Differences to map's Jaccard, each with its interval over seeds and prompts."""
    own = {seed: jaccard(opened, Deterministic(), seed) for seed in SEEDS}
    print("T  | Jaccard - map at gamma", *stability.GAMMAS)
    for temperature in dict.fromkeys(t for _, t in STARTS):
        rows = []
        for seed in SEEDS:
            config = vmoer.VariationalTemperature(weights="own", prior_mean=temperature, seed=seed)
            for gamma, by_prompt in zip(stability.GAMMAS, jaccard(opened, config, seed) - own[seed], strict=True):
                keys = {"model": "demo", "task": "demo", "method": "vtsr", "seed": seed, "gamma": gamma}
                rows.append(keys | {"value": float(by_prompt.mean()), stability.BY_PROMPT: by_prompt})
        over = [row for row in stability.over_seeds(rows) if row["seed"] is None]
        print(
            temperature, *(f"{r['value']:+.4f} [{r['low']:+.4f}, {r['high']:+.4f}]" for r in over), sep="  ", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=4)
    several = parser.parse_args().passes
    torch.set_num_threads(1)
    opened, workers = open_model("demo"), Workers.launched()
    model = opened.model
    if attachment_of(model) is not None:
        detach(model)
    examples = encode_questions(opened.tokenizer, tasks.load("demo", "validation"), 2048)
    answers = np.asarray(examples.answers)
    own = evaluate(model, examples, workers).numpy()
    print(f"map  accuracy {m.accuracy(own, answers):.3f}  NLL {m.nll(own, answers):.3f}")
    stabilities(opened)
    print("weights  T  passes  | a seed: accuracy, NLL - map [interval]")
    for weights, temperature in STARTS:
        for passes in (1, several):
            said = []
            for seed in SEEDS:
                attach(model, vmoer.VariationalTemperature(weights=weights, prior_mean=temperature, seed=seed))
                found = evaluate(model, examples, workers, passes=passes).numpy()
                detach(model)
                ours, theirs = m.nll_per_question(found, answers), m.nll_per_question(own, answers)
                pair = m.paired_bootstrap(ours, theirs, seed=0)
                said.append(f"{m.accuracy(found, answers):.3f} {pair.value:+.3f} [{pair.low:+.3f}, {pair.high:+.3f}]")
            print(weights, temperature, passes, *said, sep="  ", flush=True)


if __name__ == "__main__":
    main()
