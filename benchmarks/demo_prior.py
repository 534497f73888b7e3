"""Which prior scale the default preset takes: stage 2 on the embedded model's held-out questions, measured on validation.

python benchmarks/demo_prior.py [--out DIR] [NAME ...]      two minutes a row on one core
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

import vmoer
from vmoer import metrics as m
from vmoer import tasks
from vmoer.evaluation.answers import predict_task
from vmoer.models import open_model
from vmoer.training.run import Data, Plan, Stages, train

ROWS = {
    "vglr-mf, s0 = 0.5": vmoer.MeanField(beta=0.001, prior_scale=0.5),
    "vglr-fc, s0 = 0.3": vmoer.FullCovariance(beta=0.001, prior_scale=0.3),
    "vglr-fc, s0 = 1": vmoer.FullCovariance(beta=0.001, prior_scale=1.0),
    "mean-only": vmoer.MeanField(beta=0.001, learn="mean"),
}
STAGES = Stages(stage1=Plan(epochs=0), stage2=Plan(epochs=8, batch_size=32, lr=2e-3, patience=4))


def measure(name: str, config: vmoer.routers.Config, out: Path) -> None:
    run = out / "".join(c if c.isalnum() else "-" for c in name)
    train("demo", "demo", config, out=run, stages=STAGES, data=Data(stage2="split:heldout"))
    opened, questions = open_model(run), tasks.load("demo", "validation")
    for averaging in ("router", "full"):
        table = pq.read_table(
            predict_task(
                opened.model, opened.tokenizer, questions, folder=run / averaging, averaging=averaging, passes=8
            )
        )
        log_probs, answers = m.pad(table["log_probs"].to_pylist()), np.asarray(table["answer"].to_pylist())
        confidence, correct = m.confidence(log_probs), m.correct_per_question(log_probs, answers)
        found = (m.accuracy(log_probs, answers), m.nll(log_probs, answers), m.brier(log_probs, answers))
        print(
            name, averaging, *(f"{x:.3f}" for x in (*found, m.debiased_ece(confidence, correct))), sep="  ", flush=True
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(ROWS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("method  averaging  accuracy  NLL  Brier  dECE")
    for chosen in arguments.names:
        measure(chosen, ROWS[chosen], arguments.out or Path(tempfile.mkdtemp()))
