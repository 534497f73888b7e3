"""`vmoer threshold DIR --risk R`: when to abstain, chosen on validation and held against test."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from vmoer.commands._shared import DataRoot, Device, Dtype, Json, NoCalibrator, check_device, progress, quiet, table
from vmoer.errors import InputError
from vmoer.evaluation import predictions
from vmoer.files import locked
from vmoer.saved import manifest


def threshold(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of `vmoer eval`, or a run of `vmoer train`.")],
    risk: Annotated[float, typer.Option(help="The largest share of wrong answers among those given.")] = 0.1,
    confidence: Annotated[float, typer.Option(help="The probability with which that bound must hold.")] = 0.95,
    signal: Annotated[
        str | None, typer.Option(help="Abstain on large values of this; by default predictive_entropy, or the score.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Which method's answers, where the folder holds several.")] = None,
    seed: Annotated[int | None, typer.Option(help="Which seed, where there are several.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; by default DIR/threshold.json.")] = None,
    data_root: DataRoot = None,
    device: Device = None,
    dtype: Dtype = None,
    no_calibrator: NoCalibrator = False,
    as_json: Json = False,
) -> None:
    """Choose when to abstain: the threshold on validation for a wanted risk, its coverage and risk on test."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    run, texts = manifest.complete(folder), (folder / predictions.TEXTS).exists()
    if not run and not texts:  # a run may have answered nothing yet
        predictions.files(folder)
    from vmoer.evaluation.threshold import FILE, answer_run, choose, read_source, unanswered, write_threshold

    path = out or folder / FILE
    ask = unanswered(folder)
    with locked(folder):
        if ask:
            quiet()
            check_device(device)
            with progress() as show:
                answer_run(folder, data_root=data_root, device=device, dtype=dtype, progress=show)
        chosen = choose(read_source(folder, method, seed, not no_calibrator), signal, risk, confidence)
        write_threshold(path, chosen)
    if as_json:
        print(json.dumps(chosen, indent=2))
        return
    _show(chosen)
    print(f'{path}; to ask with it:\nvmoer ask MODEL --router RUN "question" --abstain-above {shlex.quote(str(path))}')


def _show(chosen: dict[str, Any]) -> None:
    def interval(numbers: list[float]) -> str:
        return f"{numbers[0]:.3f} [{numbers[1]:.3f}, {numbers[2]:.3f}]"

    from vmoer.evaluation.threshold import Threshold

    what = f"answer where {chosen['signal']} <= {Threshold(chosen['threshold'], chosen)}"
    header = ("split", "questions", "answered", "coverage", "errors", "risk", "risk of all")
    rows = []
    for split in [name for name in chosen if isinstance(chosen[name], dict)]:
        s = chosen[split]
        cells = (split, s["questions"], s["answered"], interval(s["coverage"]), s["errors"], interval(s["risk"]))
        rows.append((*cells, f"{s['risk_of_all']:.3f}"))
    table(f"{chosen['method']} on {chosen['task']}: {what}", header, rows)
    promised, confidence = chosen["promised_risk"], chosen["confidence"]
    print(f"risk is at most {promised:.3f} with confidence {confidence:g} (exact, on validation)")
