"""What averaging over orders of the options costs, in tokens and seconds, with and without running once what they begin with.

    python benchmarks/orders.py MODEL --task openbookqa [--passes 8] [--limit 200] [--data-root DATA]

Tokens are counted in front of the first layer with their padding; seconds are the median of three, after one to warm up.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch

import vmoer
from vmoer import tasks
from vmoer.evaluation.answers import answer_questions
from vmoer.live.attach import attachment_of
from vmoer.models import open_model
from vmoer.report.tables import grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--task", required=True)
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--data-root")
    given = parser.parse_args()
    model, tokenizer, *_ = open_model(given.model)
    if attachment_of(model) is None:
        vmoer.attach(model, vmoer.Deterministic())
    questions = tasks.load(given.task, "test", data_root=given.data_root, limit=given.limit)
    counted = [0]

    def count(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        counted[0] += args[0].shape[:-1].numel()

    layer = next(module for name, module in model.named_modules() if name.endswith("layers.0"))
    layer.register_forward_pre_hook(count)

    def measured(ask: Callable[[], object]) -> tuple[float, float]:
        seconds = []
        for _ in range(4):
            counted[0], start = 0, time.perf_counter()
            ask()
            seconds.append(time.perf_counter() - start)  # answers are on the CPU: the device is done
        return counted[0] / len(questions), statistics.median(seconds[1:])

    def orders() -> object:
        return answer_questions(model, tokenizer, questions, averaging="orders", passes=given.passes)

    found = {"one pass": measured(lambda: answer_questions(model, tokenizer, questions)), "orders": measured(orders)}
    with patch("vmoer.evaluation.views.shares_prompts", lambda model: False):
        found["orders, each from its first token"] = measured(orders)
    tokens, seconds = found["one pass"]
    body = [[name, f"{t:.0f}", f"{t / tokens:.2f}", f"{s:.2f}", f"{s / seconds:.2f}"] for name, (t, s) in found.items()]
    print("\n".join(grid([given.task, "tokens", "of one pass", "seconds", "of one pass"], body)))


if __name__ == "__main__":
    main()
