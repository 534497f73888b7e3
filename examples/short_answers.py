"""Which score of a generated answer tells right from wrong? Multiple-choice questions, asked without their options.

    python examples/short_answers.py MODEL [--router RUN] --task sciq --out DIR

MODEL is a hub id, a local folder, a run folder of `vmoer train`, or demo. The validation and test questions are answered freely
and greedily; questions that point at their options ("which of the following") are left out. An answer is **right** when its
first line contains the right option as whole words in a row, both without case, punctuation and articles.

For every score: AUROC of telling wrong answers from right ones (0.5 is chance) and AURC (the mean risk over all coverages,
lower is better), with 95% bootstrap intervals over questions, and the paired difference to `nll`, the length-normalised negative
log-probability. `answer_tokens` is the null: what the answer's length alone gives. The score that is best on validation is named;
what it is worth, test says.

DIR/answers.parquet       a row a question: text, correct, every score (`vmoer threshold DIR` reads it)
DIR/short_answers.json    the numbers;  DIR/short_answers.md  the same as a table
"""

import argparse
import re
import sys
import unicodedata
from pathlib import Path
from typing import Any

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
from vmoer.tasks import subsample

BASELINE, NULL = "nll", "answer_tokens"
INSTRUCTION = "Answer the question with a single word or a short phrase and nothing else."
POINTING = re.compile(r"\bof the following\b|\b(which|one|all|none) of these\b", re.I)


def normal(text: str) -> list[str]:
    """The words of a text, without case, punctuation and articles."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    words = re.sub(r"[^\w\s]", " ", folded).split()
    return [word for word in words if word not in ("a", "an", "the")] or words


def right(text: str, gold: str) -> bool:
    """Whether the first line of the text has the words of the gold answer in a row."""
    said, wanted = normal((text.strip().splitlines() or [""])[0]), normal(gold)
    return any(said[i : i + len(wanted)] == wanted for i in range(len(said) - len(wanted) + 1)) if wanted else False


def prompt(tokenizer: Any, question: str, shots: list[tasks.Question], instruction: str) -> Any:
    """Chat messages, the examples as turns, where there is a template; else text that ends in `Answer:`."""
    lead = f"{instruction}\n\n" if instruction else ""
    if getattr(tokenizer, "chat_template", None):
        turns = [turn for shot in shots for turn in (("user", shot.question), ("assistant", shot.choices[shot.answer]))]
        turns.append(("user", question))
        return [{"role": role, "content": (lead if n == 0 else "") + text} for n, (role, text) in enumerate(turns)]
    shown = "".join(f"Question: {shot.question}\nAnswer: {shot.choices[shot.answer]}\n\n" for shot in shots)
    return f"{lead}{shown}Question: {question}\nAnswer:"


def answer(model: Any, tokenizer: Any, questions: list[tasks.Question], given: argparse.Namespace) -> list[Answer]:
    shots = tasks.load(given.task, "train", data_root=given.data_root, limit=given.shots) if given.shots else []
    prompts = [prompt(tokenizer, q.question, shots, given.instruction) for q in questions]
    how = {name: getattr(given, name) for name in ("max_new_tokens", "passes", "batch_size", "seed")}
    if not getattr(tokenizer, "chat_template", None):
        how["stop_strings"] = ["\n"]
    found: list[Answer] = vmoer.generate(model, tokenizer, prompts, **how)
    return found


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
    lines.append(
        "95% bootstrap intervals over questions; differences are paired. AUROC: higher is better; AURC: lower is."
    )
    return "\n".join(lines) + "\n"


def asked(given: argparse.Namespace) -> dict[str, list[tasks.Question]]:
    """Validation and test, but for questions that point at their options."""
    sets = {}
    for split in ("validation", "test"):
        found = tasks.load(given.task, split, data_root=given.data_root)
        found = [q for q in found if not POINTING.search(q.question)]
        sets[split] = found if given.limit is None else subsample(found, given.limit, seed=0)
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
    about = {"task": sets["test"][0].task, "method": method, "seed": given.seed}
    rows, measured = [], {}
    for split, questions in sets.items():
        print(f"{split}: {len(questions)} questions", file=sys.stderr, flush=True)
        answers = answer(model, opened.tokenizer, questions, given)
        own = []
        for q, a in zip(questions, answers, strict=True):
            gold = q.choices[q.answer]
            row = {"id": q.id, "split": split, **about, "question": q.question, "gold": gold, "text": a.text.strip()}
            own.append(row | {"correct": right(a.text, gold)} | a.scores | {NULL: float(len(a.tokens))})
        scores = {name: np.array([row[name] for row in own]) for name in (*answers[0].scores, NULL)}
        measured[split] = scores, np.array([0.0 if row["correct"] else 1.0 for row in own])
        rows += own
    given.out.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), given.out / "answers.parquet")
    write_json(given.out / "meta.json", {"model": opened.name, "passes": given.passes, "score": SCORE})
    result = {"model": opened.name, **about, "passes": given.passes, "shots": given.shots, "splits": {}}
    for split, (scores, errors) in measured.items():
        found = {"questions": len(errors), "accuracy": float(1 - errors.mean())}
        result["splits"][split] = found | {"rows": ranked(scores, errors, given.draws, given.seed)}
    best = next(row["score"] for row in result["splits"]["validation"]["rows"] if row["score"] != NULL)
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
