"""The command line: one function a command, each parses, calls and prints. `main` turns errors into one line and a code.

Exit codes: 0 done, 1 the work failed, 2 bad input, 130 interrupted. VMOER_DEBUG=1 shows tracebacks.
"""

import json
import os
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

import vmoer
from vmoer.errors import InputError, RunError

if TYPE_CHECKING:
    from vmoer.gates import Found
    from vmoer.report import Table as ReportTable
    from vmoer.tasks import Question

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps; by default a GPU where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, float16; by default bfloat16 on a GPU.")]
DataRoot = Annotated[
    Path | None, typer.Option(help="Read DIR/<task>/<split>.jsonl in place of the hub (or set VMOER_DATA).")
]
PaperSplits = Annotated[bool, typer.Option("--paper-splits", help="Subsample each split to the paper's size.")]


@app.callback(invoke_without_command=True)
def vmoer_(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Calibrated uncertainty for Mixture-of-Experts language models by variational routing."""
    if version:
        print(f"vmoer {vmoer.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


# -- info --------------------------------------------------------------------------------------------------------------


@app.command()
def info(
    model: Annotated[str, typer.Argument(help="A hub id, a local folder, a run folder, or demo.")],
    as_json: Json = False,
) -> None:
    """The MoE layers of a model: router class, scoring rule, experts, top-k, and whether each can be attached."""
    from vmoer import gates

    _quiet()
    found = gates.find(_skeleton(model))
    if not found:
        raise InputError(f"{model} has no MoE router: it is a dense model, or its routers are unknown here")
    rows = [_describe(f) for f in found]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    header = ("layers", "router", "class", "scoring", "experts", "top-k", "attach")
    _table(f"{model}: {len(rows)} MoE layers", header, _grouped(rows))


def _grouped(rows: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """Layers that differ in nothing but their number share a line."""
    lines: dict[tuple[object, ...], list[int]] = {}
    for r in rows:
        path = re.sub(rf"\.{r['layer']}\.", ".N.", r["path"], count=1)
        key = (path, r["class"], _scoring(r), r["experts"], r["top_k"], r["reason"] or "yes")
        lines.setdefault(key, []).append(r["layer"])
    return [(_ranges(layers), *key) for key, layers in lines.items()]


def _ranges(numbers: list[int]) -> str:
    """0-3, 5, 7-9"""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _skeleton(name: str) -> Any:
    """The model without its weights, from its configuration alone."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from vmoer.models import embedded, read_run

    path = str(read_run(Path(name))["model"]) if (Path(name) / "run.json").exists() else name
    path = embedded(path) or path
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"cannot load the model {name!r}: {str(error).strip().splitlines()[0]}") from None


def _describe(found: "Found") -> dict[str, Any]:
    from vmoer.errors import AttachError
    from vmoer.gates import Gate
    from vmoer.gates.rules import lookup

    row: dict[str, Any] = dict.fromkeys(("score", "normalise", "groups", "bias", "scale", "experts", "top_k"))
    row = {"layer": found.layer, "path": found.path, "class": found.kind, **row, "reason": found.reason or None}
    if found.reason or found.rule is None:
        return row
    try:
        gate = Gate.probe(found)
    except AttachError as error:
        return row | {"reason": str(error)}
    scoring, bias = gate.scoring, found.rule.bias
    return row | {
        "score": "sparsemixer" if found.rule.mixer else scoring.score,
        "normalise": scoring.normalise,
        "groups": scoring.groups,
        "bias": bias if bias and lookup(bias, found.router, found.block) is not None else None,
        "scale": scoring.scale,
        "experts": gate.num_experts,
        "top_k": scoring.k,
    }


def _scoring(row: dict[str, Any]) -> str:
    if row["score"] is None:
        return ""
    groups = f"best {row['groups'][1]} of {row['groups'][0]} groups" if row["groups"] else ""
    scale = f"times {row['scale']:g}" if row["scale"] != 1 else ""
    said = (row["score"], "bias" if row["bias"] else "", groups, "normalised" if row["normalise"] else "", scale)
    return ", ".join(filter(None, said))


# -- eval --------------------------------------------------------------------------------------------------------------


@app.command("eval")
def eval_(
    run_or_model: Annotated[str, typer.Argument(help="A run folder of `vmoer train`, a hub id, a folder, or demo.")],
    task: Annotated[str, typer.Option(help="A built-in task, or the path of a JSONL file.")],
    out: Annotated[Path, typer.Option(help="Where predictions.parquet, meta.json and metrics.json go.")],
    ood: Annotated[str, typer.Option(help="Out-of-distribution tasks, separated by commas.")] = "",
    split: Annotated[str, typer.Option(help="Which split of the task; validation is answered too.")] = "test",
    averaging: Annotated[str, typer.Option(help="What is averaged over routing: router, answer or full.")] = "router",
    passes: Annotated[int, typer.Option(help="Passes of answer and full averaging.")] = 8,
    seed: Annotated[int | None, typer.Option(help="By default that of the run, or 0.")] = None,
    data_root: DataRoot = None,
    paper_splits: PaperSplits = False,
    limit: Annotated[int | None, typer.Option(help="At most this many questions of each split.")] = None,
    batch_tokens: Annotated[int, typer.Option(help="Prompt tokens in a batch, padding included.")] = 8192,
    device: Device = None,
    dtype: Dtype = None,
    routing: Annotated[bool, typer.Option("--routing", help="Write routing.parquet: the experts selected.")] = False,
    as_json: Json = False,
) -> None:
    """Answer a task's questions, and those of out-of-distribution tasks; write predictions, then metrics from them.

    Killed and started again it goes on where it was.
    """
    from vmoer import scores
    from vmoer.models import open_model
    from vmoer.predict import predict_task
    from vmoer.report import summaries

    _quiet()
    asked = {"data_root": data_root, "paper_splits": paper_splits, "limit": limit}
    questions = _questions(task, split, [name for name in ood.split(",") if name], asked)
    _check_device(device, dtype)
    opened = open_model(run_or_model, device=device, dtype=dtype)
    run = opened.run or {}
    predict_task(
        opened.model,
        opened.tokenizer,
        questions,
        folder=out,
        name=opened.name,
        method=run.get("method"),
        seed=run.get("seed", 0) if seed is None else seed,
        averaging=cast(Any, averaging),
        passes=passes,
        batch_tokens=batch_tokens,
        routing=routing,
        progress=True,
    )
    rows = json.loads(scores.write(out).read_text())
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        found = summaries.settings(rows)
        _print_tables([summaries.calibration_table(scored) for scored in found])
        _print_tables([summaries.detection_table(scored) for scored in found if scored.setting.shifted])
        print(f"{out / 'predictions.parquet'}, {out / 'metrics.json'}; all tables and figures: vmoer report {out}")


def _questions(task: str, split: str, ood: list[str], asked: dict[str, Any]) -> "list[Question]":
    """The task's split, its validation split (for temperature scaling of the output), each OoD task's test split."""
    from vmoer.tasks import load

    sets = [load(task, split, **asked)]
    if split not in ("validation", "all"):
        try:
            sets.append(load(task, "validation", **asked))
        except InputError as error:
            if not re.search(r"\b(no|for) split 'validation'", str(error)):
                raise
            warnings.warn(f"without temperature scaling of the output: {error}", stacklevel=1)
    sources = [sets[0][0].task]
    for name in ood:
        sets.append(load(name, "test", **asked))
        if sets[-1][0].task in sources:
            raise InputError(f"the task {sets[-1][0].task} is named twice")
        sources.append(sets[-1][0].task)
    return [question for questions in sets for question in questions]


def _check_device(device: str | None, dtype: str | None) -> None:
    import torch

    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise InputError(f"dtype={dtype!r}: choose one of float32, bfloat16, float16")
    try:
        torch.empty(1, device=device or "cpu")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device={device!r} cannot be used: {str(error).strip().splitlines()[0]}") from None


# -- report ------------------------------------------------------------------------------------------------------------


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `vmoer eval` wrote.")],
    as_json: Json = False,
) -> None:
    """Tables, and one HTML page with figures, from the predictions in a folder."""
    from vmoer.report import read, tables
    from vmoer.report import report as write_report

    page = write_report(folder)
    rows = read(folder)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print_tables(tables(rows))
        print(page)


# -- sensitivity, train, study, demo -----------------------------------------------------------------------------------


@app.command()
def sensitivity(
    model: Annotated[str, typer.Argument(help="A hub id, a local folder, a run folder, or demo.")],
    task: Annotated[str, typer.Option(help="A built-in task, or the path of a JSONL file.")],
    out: Annotated[Path | None, typer.Option(help="Where the rows, the ranking and two figures go.")] = None,
    questions: Annotated[int, typer.Option(help="How many test prompts to measure on.")] = 200,
    data_root: DataRoot = None,
    device: Device = None,
    dtype: Dtype = None,
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """How brittle each layer's routing is under noise on its input, and the ranking that layer choice goes by."""
    from vmoer.commands import sensitivity as command

    _quiet()
    _check_device(device, dtype)
    asked: dict[str, Any] = {
        "questions": questions,
        "data_root": data_root,
        "device": device,
        "dtype": dtype,
        "seed": seed,
    }
    result, rows = command.sensitivity(model, task, **asked)
    if out is not None:
        command.write(out, result, rows)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    header = ("layer", *(f"{gamma:g}" for gamma in result.gammas))
    lines = [
        (layer, *(f"{value:.3f}" for value in means))
        for layer, means in zip(result.layers, result.mean_LG, strict=True)
    ]
    _table(f"{model}: Jaccard of expert sets by noise level gamma", header, lines)
    print("most brittle first at gamma 0.01: " + ", ".join(str(int(layer)) for layer in result.ranking()))


@app.command()
def train(
    model: Annotated[str, typer.Argument(help="A hub id, a local folder, or demo.")],
    task: Annotated[str, typer.Option(help="A built-in task, or the path of a JSONL file.")],
    out: Annotated[Path, typer.Option(help="The run folder.")],
    method: Annotated[
        str, typer.Option(help="map, temp-scale, mcdr, swag, vglr-mf, vglr-fc, vglr-lr, vtsr or laplace.")
    ] = "vglr-fc",
    layers: Annotated[
        str | None, typer.Option(help="all, susceptible:10, first:4, middle:4, last:4, or 0,3,5.")
    ] = None,
    preset: Annotated[str, typer.Option(help="default, or paper: the protocol exactly as printed.")] = "default",
    beta: Annotated[float | None, typer.Option(help="Weight of the KL, in place of the preset's.")] = None,
    objective: Annotated[str, typer.Option(help="elbo, or predictive: log of the passes' mean likelihood.")] = "elbo",
    passes: Annotated[int, typer.Option(help="Passes of the predictive objective.")] = 4,
    stage2_data: Annotated[str | None, typer.Option(help="train, held-out:0.2, or split:NAME.")] = None,
    noisy_stage1: Annotated[
        bool, typer.Option("--noisy-stage1", help="The router's noise in stage 1 already.")
    ] = False,
    search: Annotated[bool, typer.Option("--search", help="Choose beta on validation.")] = False,
    from_map: Annotated[Path | None, typer.Option(help="Take stage 1 from this run.")] = None,
    rank: Annotated[int, typer.Option(help="Rank of the LoRA adapter of stage 1.")] = 16,
    stage1_epochs: int = 3,
    stage1_lr: float = 1e-4,
    stage2_epochs: int | None = None,
    stage2_lr: float | None = None,
    batch_size: Annotated[int, typer.Option(help="Questions a step, over all processes.")] = 16,
    micro_batch: Annotated[int | None, typer.Option(help="Questions a pass; the rest is accumulated.")] = None,
    skip_nonfinite: Annotated[
        bool, typer.Option("--skip-nonfinite", help="Pass over such steps and count them.")
    ] = False,
    seed: int = 0,
    data_root: DataRoot = None,
    limit: Annotated[int | None, typer.Option(help="At most this many training questions.")] = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Stage 1 (LoRA MAP) and stage 2 (variational routers); killed and started again it goes on where it was."""
    import dataclasses

    from vmoer.train import Plan, Running, Workers
    from vmoer.train import train as run_train
    from vmoer.training.presets import preset_named

    _quiet()
    chosen = preset_named(preset)
    shape: dict[str, Any] = {"batch_size": batch_size, "micro_batch": micro_batch}
    given: dict[str, Any] = {"epochs": stage2_epochs, "lr": stage2_lr}
    found = run_train(
        model,
        task,
        method if beta is None else chosen.config(method, beta=beta),
        out=out,
        preset=chosen,
        layers=layers or chosen.layers,
        stage1_plan=Plan(epochs=stage1_epochs, lr=stage1_lr, **shape),
        stage2_plan=dataclasses.replace(chosen.stage2, **shape, **{k: v for k, v in given.items() if v is not None}),
        rank=rank,
        objective=cast(Any, objective),
        passes=passes,
        stage2_data=stage2_data,
        noisy_stage1=noisy_stage1,
        search=search,
        from_map=from_map,
        data_root=data_root,
        limit=limit,
        seed=seed,
        dtype=dtype,
        running=Running(workers=Workers.launched(), tensorboard=True, progress=True, skip_nonfinite=skip_nonfinite),
    )
    print(
        json.dumps(found, indent=2)
        if as_json
        else f"{out}: {found['method']} on {found['task']}; next: vmoer eval {out} --task {task}"
    )


@app.command()
def study(
    name: Annotated[str, typer.Argument(help="calibration, ood, stability, efficiency, brittleness, ..., or all.")],
    model: Annotated[str, typer.Option(help="A hub id, a local folder, or demo.")],
    task: Annotated[str, typer.Option(help="The source task.")],
    out: Annotated[Path, typer.Option(help="Where cells, runs, predictions and tables go.")],
    ood: Annotated[str, typer.Option(help="Shifted tasks, separated by commas, the farthest last.")] = "",
    methods: Annotated[str, typer.Option(help="Labels, separated by commas, such as map,vglr-fc,vglr-fc@paper.")] = "",
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0",
    averaging: Annotated[str, typer.Option(help="router, answer, full, separated by commas.")] = "router",
    passes: int = 8,
    search: Annotated[bool, typer.Option("--search", help="Choose beta on validation.")] = False,
    transfer_from: Annotated[Path | None, typer.Option(help="Take what was searched from this study.")] = None,
    limit: Annotated[int | None, typer.Option(help="At most this many questions of each split.")] = None,
    data_root: DataRoot = None,
    device: Device = None,
    dtype: Dtype = None,
    workers: Annotated[int, typer.Option(help="Processes that cells are handed to.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the grid and stop.")] = False,
) -> None:
    """One of the paper's experiments over methods and seeds. Finished cells are never computed again."""
    from vmoer.commands import study as command
    from vmoer.studies import Study, run_study

    _quiet()
    _check_device(device, dtype)
    settings: dict[str, Any] = {"passes": passes, "search": search, "transfer_from": transfer_from, "limit": limit}
    settings |= {"data_root": None if data_root is None else str(data_root), "device": device, "dtype": dtype}
    settings |= command.EMBEDDED if model == "demo" else {}
    asked = Study(
        model=model,
        task=task,
        out=out,
        ood=_listed(ood),
        methods=_listed(methods) or command.FULL,
        seeds=_numbers(seeds),
        averaging=_listed(averaging),
        **settings,
    )
    if dry_run:
        cells = command.dry_run(name, asked)
        _table(
            f"{name}: {len(cells)} cells", ("study", "cell", "done"), [(s, c, "yes" if d else "") for s, c, d in cells]
        )
        return
    out.mkdir(parents=True, exist_ok=True)
    failed = run_study(name, asked, workers=workers).failed
    print(f"{out / 'metrics.json'}; tables and figures: vmoer report {out}")
    if failed:
        raise RunError(f"{len(failed)} cells failed, the first: {failed[0][0].name}: {failed[0][1]}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("out/demo"),
    full: Annotated[bool, typer.Option("--full", help="All methods and studies, three seeds.")] = False,
) -> None:
    """The whole story on a small embedded MoE, without network or GPU, in a few minutes."""
    from vmoer.commands import study as command
    from vmoer.report import read
    from vmoer.report.page import headlines
    from vmoer.report.studies import BUILDERS

    _quiet()
    page = command.demo(out, full)
    print()
    for sentence in headlines([row for row in read(out) if row.get("study") not in BUILDERS]):
        print(f"- {sentence}")
    print(f"\n{page}")


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _listed(text))
    except ValueError:
        raise InputError(f"seeds={text!r}: whole numbers separated by commas") from None


# -- shared by all commands --------------------------------------------------------------------------------------------


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table as wide as the terminal; into a pipe or a file, as wide as it needs."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 240)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    console.print(table)


def _print_tables(tables: "Iterable[ReportTable]") -> None:
    from vmoer.report import to_terminal

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else None
    for table in tables:
        if table.rows:
            print(to_terminal(table, width, colour=terminal))


def _quiet() -> None:
    """For commands that open a model: what is wrong comes as an exception; the rest of what the libraries say is left out."""
    import transformers
    from huggingface_hub import logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.set_verbosity_error()
    disable_progress_bars()


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of a command line; errors go to stderr in one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries'; our own are notes to the reader
            warnings.filterwarnings("default", module=r"vmoer\.")
            warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=sys.stderr)
            code = app(args=arguments, prog_name="vmoer", standalone_mode=False)
            return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("VMOER_DEBUG") == "1":
            traceback.print_exc()
        message, code = _explain(error)
        print(" ".join(message.split()), file=sys.stderr)
        return code


def _explain(error: Exception) -> tuple[str, int]:
    if isinstance(error, InputError):
        return str(error), 2
    if isinstance(error, RunError):
        return str(error), 1
    if hasattr(error, "format_message"):  # a wrong option or argument
        return f"{error.format_message()} (see vmoer --help)", 2
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first} (VMOER_DEBUG=1 shows where)", 1


def main() -> None:
    sys.exit(run())
