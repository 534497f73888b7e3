"""`vmoer lm-eval ...`: lm-evaluation-harness's own command line with the model `vmoer`, then calibration over its samples."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import yaml  # type: ignore[import-untyped]

from vmoer.commands._shared import table
from vmoer.errors import InputError

if TYPE_CHECKING:
    from vmoer.evaluation.scores import Row

SETTINGS: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Every option goes through to lm-eval, --help among them."""


def lm_eval(context: typer.Context) -> None:
    """lm-evaluation-harness's own command line, with --model vmoer --model_args pretrained=BASE,router=RUN.

    Calibration follows its results for every multiple-choice task; `vmoer lm-eval calibration DIR` gives it for samples logged
    before, by any model.
    """
    arguments = list(context.args)
    logged = arguments[:1] == ["calibration"]
    if logged and (len(arguments) != 2 or not Path(arguments[1]).is_dir()):
        raise InputError("vmoer lm-eval calibration takes one folder: one that lm-eval wrote to with --log_samples")
    try:
        from vmoer import harness
    except ModuleNotFoundError as error:
        raise InputError(f"vmoer lm-eval needs lm-eval: pip install 'vmoer[lm-eval]' ({error})") from None

    if logged:
        files = harness.logged(Path(arguments[1]))
        if not files:
            raise InputError(f"{arguments[1]} holds no samples_*.jsonl: run lm-eval with --log_samples --output_path")
        _show(*harness.calibrate(files))
        return
    harness.register()
    with tempfile.TemporaryDirectory() as nowhere:
        arguments, out = _logging(arguments, nowhere)
        before = harness.logged(out) if out else set()
        _run(arguments)
        if out and (files := harness.logged(out) - before):
            _show(*harness.calibrate(files))
        elif out and os.environ.get("RANK", "0") == "0":
            print("no calibration: no samples were logged")


def _run(arguments: list[str]) -> None:
    from lm_eval.__main__ import cli_evaluate

    before, sys.argv = sys.argv, ["lm-eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


def _logging(arguments: list[str], nowhere: str) -> tuple[list[str], Path | None]:
    """Make an evaluation log its samples: into the user's output folder, or into `nowhere`, which is deleted afterwards.

    Returns the arguments, and the folder of the samples; None where nothing is evaluated.
    """
    known = argparse.ArgumentParser(add_help=False)
    known.add_argument("--output_path", "-o")
    known.add_argument("--config", "-C")
    known.add_argument("--tasks", "-t")
    known.add_argument("--log_samples", "-s", action="store_true")
    asked, _ = known.parse_known_args(arguments)
    if asked.config is not None:  # it may say where they go
        return arguments, Path(asked.output_path) if asked.output_path else _configured(asked.config)
    if asked.tasks is None or arguments[:1] in (["ls"], ["validate"]):
        return arguments, None
    more = [] if asked.log_samples else ["--log_samples"]
    out = asked.output_path or nowhere
    more += [] if asked.output_path else ["--output_path", nowhere]
    return [*arguments, *more], Path(out).parent if out.endswith(".json") else Path(out)


def _configured(path: str) -> Path | None:
    """The output folder that a configuration file of lm-eval names."""
    try:
        out = (yaml.safe_load(Path(path).read_text()) or {}).get("output_path")
    except (OSError, yaml.YAMLError, AttributeError):
        return None  # lm-eval will say what is wrong with it
    return Path(out) if out else None


def _show(rows: list[Row], left_out: dict[str, str]) -> None:
    shown = {"questions": "n", "accuracy": "ACC", "nll": "NLL", "brier": "Brier", "ece": "ECE"}
    shown |= {"ece_floor": "ECE floor", "ece_p": "p", "debiased_ece": "dECE"}
    lines: dict[tuple[object, ...], dict[str, str]] = {}
    for row in rows:
        lines.setdefault((row["task"], row["model"], row["method"], row["run"]), {})[row["metric"]] = _number(row)
    cells = [(*key[:3], *(line[name] for name in shown)) for key, line in lines.items()]
    if cells:
        table("Calibration over the options, 95% intervals", ("task", "model", "method", *shown.values()), cells)
    for task, reason in left_out.items():
        print(f"no calibration for {task}: {reason}")


def _number(row: Row) -> str:
    if row["metric"] == "questions":
        return str(row["value"])
    interval = "" if row["low"] is None or row["high"] is None else f" [{row['low']:.3f}, {row['high']:.3f}]"
    return f"{row['value']:.3f}{interval}"
