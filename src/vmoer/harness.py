"""lm-evaluation-harness: the model `vmoer`, and calibration over the samples that any of its models logged.

    lm-eval run --model vmoer --model_args pretrained=BASE,router=RUN --tasks ...

`vmoer lm-eval` is that command line with the model registered. Where lm-eval looks for plugins (group `lm_eval.models`), its own
command line knows the model too. A `multiple_choice` task logs the log-likelihood of every option, and its accuracy takes the
largest. The distribution behind that choice is

    p(option) = softmax of the options' log-likelihoods

and NLL, Brier score and ECE are of it. Where the run has a calibrator that fits, they are there a second time, of METHOD+cal.
"""

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from lm_eval.models.huggingface import HFLM
from scipy.special import log_softmax
from torch import Tensor

from vmoer import metrics as m
from vmoer._version import __version__
from vmoer.errors import InputError
from vmoer.evaluation.scores import Row
from vmoer.files import parse_json, read_json, write_json
from vmoer.inference import ORDERS
from vmoer.live.attach import attached, sampled, switched_off
from vmoer.models import embedded
from vmoer.saved import calibrator
from vmoer.saved.fetch import locate
from vmoer.saved.store import put_on, read_folder

NAME = "vmoer"


def register() -> None:
    """Make `--model vmoer` known to lm-eval in this process."""
    import lm_eval.models  # noqa: F401  its own models first
    from lm_eval.api.registry import MODEL_REGISTRY, register_model

    if NAME not in MODEL_REGISTRY:
        register_model(NAME)(VMoERLM)


class VMoERLM(HFLM):  # type: ignore[misc]
    """lm-eval's Hugging Face model with saved routers on it. Every argument of that one is taken here too.

    Args:
        router: a run folder of `vmoer train`, a folder of `vmoer.save`, or a repository on the hub; its adapter comes along.
        router_revision: of that repository.
        enabled: False runs the model's own routing, bit for bit, adapter included: what the routers are compared with.
        averaging: "router" is one pass; "full" averages the next token's probabilities over `passes` passes, at every position.
    """

    def __init__(
        self,
        pretrained: str,
        router: str | None = None,
        router_revision: str | None = None,
        enabled: bool = True,
        averaging: str = "router",
        passes: int = 8,
        **options: Any,
    ) -> None:
        if router is None:
            raise InputError("the model vmoer needs router=RUN: a run folder, a saved router, or a hub repository")
        if averaging in ORDERS:
            raise InputError(
                f"averaging={averaging!r}: lm-eval scores texts, in which no option can be moved; vmoer eval asks questions"
            )
        if averaging not in ("router", "full"):
            raise InputError(f"averaging={averaging!r}: choose router or full")
        if passes < 1:
            raise InputError(f"passes={passes} must be at least 1")
        self.router, self.router_revision, self.enabled = str(router), router_revision, bool(enabled)
        self.averaging, self.passes = averaging, int(passes)
        super().__init__(pretrained=embedded(pretrained) or pretrained, **options)

    def _create_model(self, *args: Any, **options: Any) -> None:
        super()._create_model(*args, **options)
        saved = read_folder(locate(self.router, self.router_revision))
        self._model: Any = put_on(self._model, saved, self.router)
        self.calibrator = calibrator.of(saved)

    def _routing(self) -> AbstractContextManager[None]:
        return nullcontext() if self.enabled else switched_off(self.model)

    def _model_call(self, inps: Tensor, *args: Any, **options: Any) -> Tensor:
        if self.averaging == "router" or not self.enabled:
            with self._routing():
                return super()._model_call(inps, *args, **options)
        total: Tensor | None = None  # summed pass by pass: each is a whole vocabulary at every position
        for number in range(self.passes):
            with sampled(self.model, number):
                own = torch.log_softmax(super()._model_call(inps, *args, **options).float(), -1)
            total = own if total is None else torch.logaddexp(total, own)
        assert total is not None
        return total - math.log(self.passes)

    def _model_generate(self, *args: Any, **options: Any) -> Tensor:
        if self.averaging != "router":
            raise InputError("averaging='full' scores given answers: generate with averaging=router")
        with self._routing():
            return super()._model_generate(*args, **options)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results about the model."""
        config = attached(self.model).config.to_dict() | {"layers": attached(self.model).layers}
        ours: dict[str, Any] = {"router": self.router, "router_revision": self.router_revision, "router_config": config}
        ours |= {"enabled": self.enabled, "averaging": self.averaging, "passes": self.passes}
        if self.enabled and self.calibrator is not None and self.calibrator.kind != "none":
            ours["calibrator"] = self.calibrator.file
        return {**super().get_model_info(), "vmoer": {"version": __version__, **ours}}


# -- calibration of logged samples -------------------------------------------------------------------------------------


class LoggedAnswers(NamedTuple):
    """The questions of one task: log-probabilities of the options, -inf where there are fewer, and the right ones."""

    log_probs: npt.NDArray[np.float64]
    answers: npt.NDArray[np.int64]


_LOGGED = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl")


def logged(folder: Path) -> set[Path]:
    """The files of samples under a folder that lm-eval wrote to."""
    return {path for path in folder.rglob("samples_*.jsonl") if _LOGGED.fullmatch(path.name)}


def calibrate(files: Iterable[Path], seed: int = 0) -> tuple[list[Row], dict[str, str]]:
    """Metrics of every task with options in these files, and why the other tasks have none.

    The rows have the keys of `metrics.json`. They are written to `calibration_DATE.json` beside each run's samples. No model is
    needed, and the same files give the same bytes.
    """
    rows: list[Row] = []
    left_out = {}
    by_run: dict[tuple[Path, str], list[Row]] = {}
    for path in sorted(files, key=lambda path: (_parts(path)[1], path)):
        task, date = _parts(path)
        run = by_run.setdefault((path.parent, date), [])
        try:
            read = read_samples(path)
        except InputError as error:
            left_out[task] = str(error)
            continue
        results = _results(path.parent, date)
        about: Row = {"study": "lm-eval", **_model(results, path.parent), "task": task}
        about |= {"split": None, "seed": None, "signal": None, "run": date}
        run += _rows(about, read, seed)
        if (mapped := _calibrated(results, read, task)) is not None:
            run += _rows(about | {"method": f"{about['method']}+cal"}, mapped, seed)
    for (folder, date), own in by_run.items():
        if own:
            write_json(folder / f"calibration_{date}.json", own)
        rows += own
    return rows, left_out


def _parts(path: Path) -> tuple[str, str]:
    match = _LOGGED.fullmatch(path.name)
    if match is None:
        raise InputError(f"{path} is not named as lm-eval names its samples: samples_TASK_DATE.jsonl")
    return match["task"], match["date"]


def _results(folder: Path, date: str) -> dict[str, Any]:
    """What lm-eval wrote beside the samples."""
    written = sorted(folder.glob(f"*_{date}.json"))
    found = next((path for path in written if not path.name.startswith("calibration_")), None)
    results: dict[str, Any] = read_json(found) if found else {}
    return results


def _ours(results: Mapping[str, Any]) -> dict[str, Any]:
    """What `get_model_info` said; nothing where another model answered."""
    ours: dict[str, Any] = (results.get("config") or {}).get("vmoer") or {}
    return ours


def _model(results: Mapping[str, Any], folder: Path) -> dict[str, str | None]:
    """Which model answered, and how it was routed."""
    method = (results.get("config") or {}).get("model")
    if ours := _ours(results):
        averaged = "+full" if ours["averaging"] == "full" else ""
        method = ours["router_config"]["method"] + averaged if ours["enabled"] else "map"
    return {"model": results.get("model_name") or folder.name, "method": method}


def _calibrated(results: Mapping[str, Any], read: LoggedAnswers, task: str) -> LoggedAnswers | None:
    """The answers through the run's calibrator; None where it has none, and with a note where it is for others."""
    ours = _ours(results)
    if ours.get("calibrator") is None:
        return None
    stored = calibrator.checked(ours["calibrator"], "the run's calibrator")
    try:
        stored.check_averaging(ours["averaging"], ours["passes"])
        return LoggedAnswers(stored.apply(read.log_probs), read.answers)
    except InputError as error:
        warnings.warn(f"{task} without the run's calibrator: {error}", stacklevel=1)
        return None


def _rows(about: Row, read: LoggedAnswers, seed: int) -> list[Row]:
    return [
        {**about, "metric": metric, "value": value, "low": low, "high": high}
        for metric, (value, low, high) in _metrics(*read, seed).items()
    ]


def _metrics(log_probs: Any, answers: Any, seed: int) -> dict[str, tuple[float, float | None, float | None]]:
    confidence, correct = m.confidence(log_probs), m.correct_per_question(log_probs, answers)
    floor = m.noise_floor(confidence, correct, seed=seed)
    assert floor.p_value is not None
    return {
        "questions": (len(correct), None, None),
        "accuracy": m.bootstrap(correct, seed=seed),
        "nll": m.bootstrap(m.nll_per_question(log_probs, answers), seed=seed),
        "brier": m.bootstrap(m.brier_per_question(log_probs, answers), seed=seed),
        "ece": m.bootstrap_metric(m.ece, confidence, correct, seed=seed),
        "ece_floor": (floor.mean, None, floor.high),
        "ece_p": (floor.p_value, None, None),
        "debiased_ece": m.bootstrap_metric(m.debiased_ece, confidence, correct, seed=seed),
    }


def read_samples(path: Path) -> LoggedAnswers:
    """The options' probabilities and the right answers of a multiple-choice task's logged samples."""
    try:
        samples = [parse_json(line, path.name) for line in path.read_text().splitlines()]
    except ValueError as error:
        raise InputError(f"not a file of samples: {error}") from None
    if not samples:
        raise InputError("no samples were logged")
    first = min({sample.get("filter") for sample in samples}, key=lambda name: (name != "none", str(name)))
    likelihoods, answers = [], []
    for sample in (sample for sample in samples if sample.get("filter") == first):
        options = _likelihoods(sample)
        likelihoods.append(log_softmax(options).tolist())
        answers.append(_answer(sample, options))
    return LoggedAnswers(m.pad(likelihoods), np.asarray(answers))


def _likelihoods(sample: dict[str, Any]) -> list[float]:
    """The log-likelihood of each option. With acc_mutual_info those without the prompt follow; they are left out."""
    try:
        values = [float(pair[0]) for pair in sample["filtered_resps"] if str(pair[1]) in ("True", "False")]
        contexts = [str(argument["arg_0"]) for argument in sample["arguments"].values()]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise InputError("it is not a multiple-choice task") from None
    if len(values) != len(contexts) or len(values) < 2:
        raise InputError("it is not a multiple-choice task")
    half = len(values) // 2
    if len(values) % 2 == 0 and not any(contexts[half:]) and all(contexts[:half]):
        values = values[:half]
    if not np.isfinite(values).any():
        raise InputError("the options of a question are all impossible")
    return values


def _answer(sample: dict[str, Any], options: list[float]) -> int:
    """The index of the right option; it must agree with the accuracy that lm-eval logged.

    The target is an index or an option's text. Where two options are contexts before one text, only `acc` tells which is right.
    """
    target, right = str(sample["target"]), sample.get("acc")
    texts = [str(argument["arg_1"]).strip() for argument in sample["arguments"].values()][: len(options)]
    best = int(np.argmax(options))
    if len(set(texts)) == 1 and len(options) == 2 and right in (0, 1):
        return best if right else 1 - best
    if target.isdigit() and int(target) < len(options):
        answer = int(target)
    elif texts.count(target.strip()) == 1:
        answer = texts.index(target.strip())
    else:
        raise InputError(f"its samples do not say which single option is right (target {target!r})")
    if right in (0, 1) and (best == answer) != bool(right):
        raise InputError("its accuracy is not that of the most probable option against the target")
    return answer
