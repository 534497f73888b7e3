"""Which score of a generated answer tells right from wrong? Questions that are answered freely.

    python examples/short_answers.py MODEL [--router RUN] --task sciq --out DIR
    python examples/short_answers.py MODEL --task trivia_qa --data-root DATA --samples 8 --out DIR

MODEL is a hub id, a local folder, a run folder of `vmoer train`, or demo. A task is a multiple-choice one, asked without its
options, or a name whose rows in DATA/<task>/<split>.jsonl have `answers` in place of `choices`. The validation and test questions
are answered greedily; those that point at their options ("which of the following") are left out. An answer is **right** when its
first line contains the right option, or one of the answers, as whole words in a row, both without case, punctuation and articles.

For every score: AUROC of telling wrong answers from right ones (0.5 is chance) and AURC (the mean risk over all coverages,
lower is better), with 95% bootstrap intervals over questions, and the paired difference to `nll`, the length-normalised negative
log-probability. The score that is best on validation is named; what it is worth, test says. More than `vmoer.generate` has:

    self_consistency    the share of `--samples` sampled answers that are not the greedy one
    semantic_entropy    entropy of the sampled answers' frequencies (Kuhn et al., 2023); answers whose normalised first lines
                        agree count as the same, in both
    answer_tokens       the null: what the answer's length alone gives
    text_only           the control: what the question's words say, without the model. Kernel ridge regression on words shared,
                        fitted on the validation questions; on these themselves each is left out in turn

`seconds` says what the greedy answers with their passes cost, and what the samples did.

DIR/answers.parquet       a row a question: text, correct, every score (`vmoer threshold DIR` reads it)
DIR/short_answers.json    the numbers;  DIR/short_answers.md  the same as a table
"""

import argparse
import math
import os
import re
import sys
import time
import unicodedata
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.stats import rankdata

import vmoer
from vmoer import metrics as m
from vmoer import tasks
from vmoer.commands._shared import check_device, quiet
from vmoer.errors import InputError, RunError
from vmoer.files import write_json, write_text
from vmoer.inference.generation import SCORE, Answer
from vmoer.live.attach import attachment_of
from vmoer.metrics import estimates
from vmoer.metrics.resampling import percentiles
from vmoer.models import open_model
from vmoer.report.tables import grid
from vmoer.tasks import read_jsonl, subsample

BASELINE, NULL, CONTROL = "nll", "answer_tokens", "text_only"
INSTRUCTION = "Answer the question with a single word or a short phrase and nothing else."
POINTING = re.compile(r"\bof the following\b|\b(which|one|all|none) of these\b", re.I)


def normal(text: str) -> list[str]:
    """The words of a text, without case, punctuation and articles."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    words = re.sub(r"[^\w\s]", " ", folded).split()
    return [word for word in words if word not in ("a", "an", "the")] or words


def first_line(text: str) -> list[str]:
    return normal((text.strip().splitlines() or [""])[0])


def right(text: str, *golds: str) -> bool:
    """Whether the first line of the text has the words of a gold answer in a row."""
    said = first_line(text)
    wanted = [words for words in map(normal, golds) if words]
    return any(said[i : i + len(words)] == words for words in wanted for i in range(len(said) - len(words) + 1))


class Asked(NamedTuple):
    """A question that is answered freely, and the answers that count as right, the one to show first."""

    id: str
    question: str
    golds: tuple[str, ...]


def load(task: str, split: str, data_root: Path | None, limit: int | None = None) -> list[Asked]:
    """Rows with `answers`, or a multiple-choice task with its right option as the one answer."""
    root = data_root or os.environ.get("VMOER_DATA")
    path = Path(root or ".") / task / f"{split}.jsonl"
    if root and path.is_file() and any("answers" in row for _, row in islice(read_jsonl(path), 1)):
        rows = [_open_row(row, place) for place, row in islice(read_jsonl(path), limit)]
        return rows
    found = tasks.load(task, split, data_root=data_root, limit=limit)
    return [Asked(q.id, q.question, (q.choices[q.answer],)) for q in found]


def _open_row(row: Mapping[str, Any], place: str) -> Asked:
    answers = row.get("answers")
    texts = [row.get("id"), row.get("question"), *(answers if isinstance(answers, list) else [None])]
    if len(texts) < 3 or not all(isinstance(text, str) and text.strip() for text in texts):
        raise InputError(f"{place}: a question without options has 'id', 'question' and a list of 'answers', all texts")
    return Asked(texts[0], texts[1], tuple(texts[2:]))


def prompt(tokenizer: Any, question: str, shots: list[Asked], instruction: str) -> Any:
    """Chat messages, the examples as turns, where there is a template; else text that ends in `Answer:`."""
    lead = f"{instruction}\n\n" if instruction else ""
    if getattr(tokenizer, "chat_template", None):
        turns = [turn for shot in shots for turn in (("user", shot.question), ("assistant", shot.golds[0]))]
        turns.append(("user", question))
        return [{"role": role, "content": (lead if n == 0 else "") + text} for n, (role, text) in enumerate(turns)]
    shown = "".join(f"Question: {shot.question}\nAnswer: {shot.golds[0]}\n\n" for shot in shots)
    return f"{lead}{shown}Question: {question}\nAnswer:"


def answer(
    model: Any, tokenizer: Any, questions: list[Asked], given: argparse.Namespace, **how: Any
) -> tuple[list[Answer], float]:
    """Answers, and the seconds they took."""
    shots = load(given.task, "train", given.data_root, given.shots) if given.shots else []
    prompts = [prompt(tokenizer, q.question, shots, given.instruction) for q in questions]
    how = {name: getattr(given, name) for name in ("max_new_tokens", "passes", "batch_size", "seed")} | how
    if not getattr(tokenizer, "chat_template", None):
        how["stop_strings"] = ["\n"]
    start = time.monotonic()
    found = cast(list[Answer], vmoer.generate(model, tokenizer, prompts, **how))
    return found, time.monotonic() - start


def of_samples(greedy: list[Answer], drawn: list[Answer]) -> dict[str, list[float]]:
    """What sampled answers, so many in a row for each greedy one, say about it."""
    each = len(drawn) // len(greedy)
    scores: dict[str, list[float]] = {"self_consistency": [], "semantic_entropy": []}
    for number, own in enumerate(greedy):
        said = Counter(tuple(first_line(a.text)) for a in drawn[number * each : (number + 1) * each])
        shares = np.array([*said.values()]) / each
        scores["self_consistency"].append(1 - said[tuple(first_line(own.text))] / each)
        scores["semantic_entropy"].append(float(-(shares * np.log(shares)).sum()))
    return scores


def text_only(texts: dict[str, list[str]], errors: dict[str, np.ndarray], fitted_on: str) -> dict[str, np.ndarray]:
    """How likely an error is by the words of the question alone, for each split; the one it is fitted on leaves each out.

    alpha = (K + I)^-1 (e - mean e),    K_ij = |w_i & w_j| / sqrt(|w_i| |w_j|) for sets of words w
    """

    def kernel(a: list[set[str]], b: list[set[str]]) -> np.ndarray:
        return np.array([[len(x & y) / math.sqrt(max(1, len(x) * len(y))) for y in b] for x in a])

    words = {split: [set(normal(text)) for text in own] for split, own in texts.items()}
    own, e = words[fitted_on], errors[fitted_on]
    inverse = np.linalg.inv(kernel(own, own) + np.eye(len(own)))
    alpha = inverse @ (e - e.mean())
    left_out = e - alpha / np.diag(inverse)  # the prediction for e_i by all others
    return {
        split: left_out if split == fitted_on else e.mean() + kernel(asked, own) @ alpha
        for split, asked in words.items()
    }


def ranked(scores: dict[str, np.ndarray], errors: np.ndarray, draws: int, seed: int) -> list[dict[str, Any]]:
    """AUROC and AURC of every score, and their paired differences to the baseline."""
    wrong = errors > 0
    if wrong.all() or not wrong.any():
        kind = "wrong" if wrong.all() else "right"
        raise RunError(f"all {len(errors)} answers are {kind}: there is nothing to tell apart")
    apart = (np.zeros((~wrong).sum()), np.ones(wrong.sum()))  # no lengths to match
    found = {
        name: estimates.detection((x[~wrong], x[wrong]), apart, draws, seed)[0]["auroc"] for name, x in scores.items()
    }
    confidence = {name: 1 - (rankdata(x) - 0.5) / len(x) for name, x in scores.items()}
    again: dict[str, Any] = {"draws": draws, "seed": seed}
    rows = []
    for name in scores:
        row: dict[str, Any] = {"score": name, "auroc": list(percentiles(*found[name], 0.95))}
        row["aurc"] = list(m.bootstrap_metric(m.aurc, confidence[name], errors, **again))
        if name != BASELINE:
            row[f"auroc_minus_{BASELINE}"] = list(percentiles(*(found[name] - found[BASELINE]), 0.95))
            both = confidence[name], confidence[BASELINE], errors
            row[f"aurc_minus_{BASELINE}"] = list(
                m.bootstrap_metric(lambda a, b, e: m.aurc(a, e) - m.aurc(b, e), *both, **again)
            )
        rows.append(row)
    return sorted(rows, key=lambda row: -row["auroc"][0])


def markdown(result: dict[str, Any]) -> str:
    def cell(row: dict[str, Any], name: str) -> str:
        return "{:.3f} [{:.3f}, {:.3f}]".format(*row[name]) if name in row else ""

    columns = ("auroc", f"auroc_minus_{BASELINE}", "aurc", f"aurc_minus_{BASELINE}")
    lines = [f"# Short answers: {result['model']} ({result['method']}) on {result['task']}", ""]
    for split, found in result["splits"].items():
        lines += [f"## {split}: {found['questions']} questions, accuracy {found['accuracy']:.3f}", ""]
        body = []
        for row in found["rows"]:
            marks = "".join(f" ({why})" for why, name in result["named"].items() if name == row["score"])
            body.append([f"{row['score']}{marks}", *(cell(row, name) for name in columns)])
        lines += [*grid(["score", *(name.replace("_", " ") for name in columns)], body), ""]
    took = "; ".join(f"{what}: {value:.0f} s" for what, value in result["seconds"].items() if value)
    lines.append(f"{result['passes']} passes and {result['samples']} samples a question ({took}).")
    lines.append(
        "95% bootstrap intervals over questions; differences are paired. AUROC: higher is better; AURC: lower is."
    )
    return "\n".join(lines) + "\n"


def asked(given: argparse.Namespace) -> dict[str, list[Asked]]:
    """Validation and test, but for questions that point at their options."""
    sets = {}
    for split in ("validation", "test"):
        found = load(given.task, split, given.data_root)
        found = [q for q in found if not POINTING.search(q.question)]
        sets[split] = (
            found if given.limit is None else cast(list[Asked], subsample(cast(Any, found), given.limit, seed=0))
        )
        if not sets[split]:
            raise InputError(f"{given.task} {split}: no question can be asked without its options")
    return sets


def run(given: argparse.Namespace) -> dict[str, Any]:
    sets = asked(given)
    check_device(given.device)
    opened = open_model(given.model, device=given.device, dtype=given.dtype)
    model = vmoer.load(opened.model, given.router).eval() if given.router else opened.model
    attachment = attachment_of(model)
    method = "map" if attachment is None else attachment.config.key
    about = {"task": Path(given.task).stem, "method": method, "seed": given.seed}
    rows, seconds = [], {"greedy answers and passes": 0.0, "samples": 0.0}
    names: list[str] = []
    for split, questions in sets.items():
        print(f"{split}: {len(questions)} questions", file=sys.stderr, flush=True)
        answers, took = answer(model, opened.tokenizer, questions, given)
        seconds["greedy answers and passes"] += took
        more: dict[str, list[float]] = {NULL: [float(len(a.tokens)) for a in answers]}
        if given.samples:
            sampling = {"passes": 0, "do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
            drawn, took = answer(
                model, opened.tokenizer, questions, given, **sampling, num_return_sequences=given.samples
            )
            seconds["samples"] += took
            more = of_samples(answers, drawn) | more
        names = [*answers[0].scores, *more]
        for number, (q, a) in enumerate(zip(questions, answers, strict=True)):
            row = {"id": q.id, "split": split, **about, "question": q.question, "gold": q.golds[0]}
            row |= {"text": a.text.strip(), "correct": right(a.text, *q.golds)} | a.scores
            rows.append(row | {name: values[number] for name, values in more.items()})
    of_split = {split: [row for row in rows if row["split"] == split] for split in sets}
    errors = {split: np.array([0.0 if row["correct"] else 1.0 for row in own]) for split, own in of_split.items()}
    control = text_only({s: [row["question"] for row in own] for s, own in of_split.items()}, errors, "validation")
    for split, own in of_split.items():
        for row, value in zip(own, control[split].tolist(), strict=True):
            row[CONTROL] = value
    given.out.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), given.out / "answers.parquet")
    write_json(given.out / "meta.json", {"model": opened.name, "passes": given.passes, "score": SCORE})
    settings = {name: getattr(given, name) for name in ("passes", "samples", "shots")}
    result = {"model": opened.name, **about, **settings, "seconds": seconds, "splits": {}}
    for split, own in of_split.items():
        scores = {name: np.array([row[name] for row in own]) for name in (*names, CONTROL)}
        found = {"questions": len(own), "accuracy": float(1 - errors[split].mean())}
        result["splits"][split] = found | {"rows": ranked(scores, errors[split], given.draws, given.seed)}
    of_validation = (row["score"] for row in result["splits"]["validation"]["rows"])
    best = next(name for name in of_validation if name not in (NULL, CONTROL))
    result["named"] = {"default": SCORE, "best on validation": best}
    write_json(given.out / "short_answers.json", result)
    write_text(given.out / "short_answers.md", markdown(result))
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="a hub id, a local folder, a run folder, or demo")
    add("--router", help="a run folder, or a folder of vmoer.save, to attach to the model")
    add("--task", default="sciq")
    add("--data-root", type=Path, help="read DIR/<task>/<split>.jsonl in place of the hub (or VMOER_DATA)")
    add("--limit", type=int, help="at most this many questions of each split")
    add("--shots", type=int, default=0, help="answered examples from train in the prompt")
    add("--instruction", default=INSTRUCTION)
    add("--passes", type=int, default=8, help="routing samples of the finished text; 0 for none")
    add("--samples", type=int, default=0, help="answers sampled for each question, for two scores more")
    add("--max-new-tokens", type=int, default=16)
    add("--batch-size", type=int, default=64)
    add("--draws", type=int, default=1000, help="of the bootstrap")
    add("--seed", type=int, default=0)
    add("--device")
    add("--dtype")
    add("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    quiet()
    try:
        print(markdown(run(given)))
    except (InputError, RunError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
