"""The command line: the table of commands, each imported when it is called; errors become one line and an exit code.

Exit codes: 0 done, 1 the work failed, 2 bad input, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM). VMOER_DEBUG=1 shows
tracebacks.
"""

import errno
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

from vmoer._version import __version__
from vmoer.errors import InputError, RunError, of_files, unknown

try:
    import rich  # noqa: F401
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError as absent:
    print(f"the commands of vmoer need {absent.name}: pip install 'vmoer[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

COMMANDS = {
    "demo": ("demo:demo", "The whole story on a small embedded model."),
    "info": ("info:info", "The MoE layers of a model, and what can be attached."),
    "sensitivity": ("sensitivity:sensitivity", "How brittle each layer's routing is, and the ranking."),
    "train": ("train:train", "Stage 1 (LoRA MAP) and stage 2 (variational routers)."),
    "eval": ("eval:eval_", "Answer questions; write predictions, then metrics."),
    "study": ("study:study", "One of the paper's experiments over methods and seeds."),
    "report": ("report:report", "Tables and one HTML page from a folder of results."),
    "ask": ("ask:ask", "Ask a question: uncertain tokens are marked."),
    "threshold": ("threshold:threshold", "Choose when to abstain, for a wanted risk."),
    "calibrate": ("calibrate:calibrate", "Fit a calibrator on validation, and keep it with the run."),
    "merge": ("merge:merge", "A run's adapter in the weights of its base model."),
    "serve": ("serve:serve", "Serve on vLLM: uncertainty for every token."),
    "bench": ("bench:bench", "Time and memory of every method on this machine."),
    "lm-eval": ("lm_eval:lm_eval", "lm-evaluation-harness with the model vmoer."),
}
"""A command's module and function in `vmoer.commands`, and what `vmoer --help` says of it."""
NEEDS = {
    "demo": ("pyarrow", "matplotlib", "jinja2"),
    "sensitivity": ("matplotlib",),
    "train": ("peft",),
    "eval": ("pyarrow",),
    "study": ("pyarrow", "peft"),
    "report": ("pyarrow", "matplotlib", "jinja2"),
    "threshold": ("pyarrow",),
    "calibrate": ("pyarrow",),
}
"""What a command imports beyond the `cli` extra's parser and tables."""
EXTRAS = {"peft": "train", "pyarrow": "eval", "matplotlib": "report", "jinja2": "report"}
_PLAIN: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}


def command(name: str) -> Any:
    """Import a command and give it to the parser, with its options."""
    module, function = COMMANDS[name][0].split(":")
    found = import_module(f"vmoer.commands.{module}")
    one = typer.Typer(**_PLAIN)
    one.command(name, context_settings=getattr(found, "SETTINGS", None))(getattr(found, function))
    return typer.main.get_command(one)


class _OnDemand(TyperGroup):
    """The group of all commands. It knows their names and one line of help; the rest waits until one is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            raise unknown("command", cmd_name, COMMANDS)
        return command(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """What a command needs is looked for before it is imported, unless its help alone is asked for."""
        absent = [name for name in NEEDS.get(args[0], ()) if find_spec(name) is None]
        if absent and not {"-h", "--help"} & {*args}:
            extras = {EXTRAS[name] for name in absent}
            extra = extras.pop() if len(extras) == 1 else "all"
            raise InputError(f"vmoer {args[0]} needs {' and '.join(absent)}: pip install 'vmoer[{extra}]'")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


app = typer.Typer(
    cls=_OnDemand, context_settings={"help_option_names": ["-h", "--help"]}, **_PLAIN | {"add_completion": True}
)


@app.callback(invoke_without_command=True)
def vmoer(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    tasks: Annotated[bool, typer.Option("--tasks", help="Print the built-in tasks.")] = False,
) -> None:
    """Uncertainty for Mixture-of-Experts language models by variational routing."""
    if version:
        print(f"vmoer {__version__}")
    elif tasks:
        print("\n".join(import_module("vmoer.tasks").names()))
    elif context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of a command line; errors go to stderr in one line."""
    try:
        with _stoppable(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries'; our own are notes to the reader
            warnings.filterwarnings("default", module=r"vmoer\.")
            warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=sys.stderr)
            code = app(args=arguments, prog_name="vmoer", standalone_mode=False)
            return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        if stop.code in _STOPS:
            with suppress(OSError):  # whoever read it may have ended first
                print(_STOPS[stop.code], file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        if os.environ.get("VMOER_DEBUG") == "1":
            traceback.print_exc()
        message, code = _explain(error)
        print(" ".join(message.split()), file=sys.stderr)
        return code


_NO_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
_STOPS: dict[object, str] = {128 + signal.SIGINT: "interrupted", 128 + signal.SIGTERM: "terminated"}
_GRACE = 4.0  # seconds from a signal to the end, whatever is still being tidied up


@contextmanager
def _stoppable() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the command by an exception, so that what it began is tidied up; by force where that takes long."""
    timers: list[threading.Timer] = []
    told: list[int] = []

    def stop(number: int, frame: object) -> None:
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, signal.SIG_IGN)  # one is enough: a second would interrupt the tidying
        told.append(128 + number)
        timers.append(threading.Timer(_GRACE, _end, told))
        timers[0].daemon = True
        timers[0].start()
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except BaseException:
        if not told:
            raise
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if told:  # libraries give the exception on as another, swallow it, or fail because their processes were told too
        raise SystemExit(told[0])


def _end(code: int) -> None:
    """End this process and its children now."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


def _explain(error: Exception) -> tuple[str, int]:
    if isinstance(error, InputError):
        return str(error), 2
    if isinstance(error, RunError):
        return str(error), 1
    if hasattr(error, "format_message"):  # a wrong option or argument
        asked = getattr(getattr(error, "ctx", None), "command_path", "vmoer")
        return f"{error.format_message().rstrip('.')}; see {asked} --help", 2
    if isinstance(error, OSError) and error.errno in _NO_WRITING:
        return of_files(error), 1
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first} (VMOER_DEBUG=1 shows where)", 1


def main() -> None:
    code = run()
    if code in _STOPS:  # everything is tidied up; Python would take seconds to unload what the libraries loaded
        with suppress(OSError):  # nobody reads it any more
            sys.stdout.flush()
        _end(code)
    sys.exit(code)
