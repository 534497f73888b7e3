"""Where VTSR should start: experts sampled at one temperature in every layer of the embedded model, measured on validation.

python benchmarks/demo_temperature.py [--passes 4]      five minutes on one core

Nothing is trained: these are the states that stage 2 starts from, and keeps where training does not improve on them. Against
map, for three seeds of the noise: accuracy, and the paired difference of NLL with its interval, in one pass and averaged over
`--passes` whole passes. `scaled` weighs by l / T as the paper does, `own` by l.
"""

import argparse

import numpy as np
import torch

import vmoer
from vmoer import metrics as m
from vmoer import tasks
from vmoer.attach import attach, attachment_of, detach
from vmoer.models import open_model
from vmoer.training.data import encode_questions
from vmoer.training.objective import evaluate
from vmoer.training.workers import Workers

STARTS = [("scaled", t) for t in (0.3, 1.0)] + [("own", t) for t in (0.1, 0.15, 0.2, 0.3, 0.5)]
SEEDS = (0, 1, 2)


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
    print("weights  T  passes  | a seed: accuracy, NLL - map [interval]")
    for weights, temperature in STARTS:
        for passes in (1, several):
            said = []
            for seed in SEEDS:
                attach(model, vmoer.VariationalTemperature(weights=weights, prior_mean=temperature, seed=seed))
                found = evaluate(model, examples, workers, passes=passes).numpy()
                detach(model)
                pair = m.paired_bootstrap(*(m.nll_per_question(x, answers) for x in (found, own)), seed=0)
                said.append(f"{m.accuracy(found, answers):.3f} {pair.value:+.3f} [{pair.low:+.3f}, {pair.high:+.3f}]")
            print(weights, temperature, passes, *said, sep="  ", flush=True)


if __name__ == "__main__":
    main()
