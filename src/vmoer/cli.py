"""The command line: registers the commands; `main` turns errors into one line and a code.

Exit codes: 0 done, 1 the work failed, 2 bad input, 130 interrupted. VMOER_DEBUG=1 shows tracebacks.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

import vmoer
from vmoer.commands import ask, bench, eval, info, lm_eval, report, sensitivity, study, threshold, train
from vmoer.errors import InputError, RunError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def vmoer_(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Calibrated uncertainty for Mixture-of-Experts language models by variational routing."""
    if version:
        print(f"vmoer {vmoer.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


app.command("demo")(study.demo)
app.command("info")(info.info)
app.command("sensitivity")(sensitivity.sensitivity)
app.command("train")(train.train)
app.command("eval")(eval.eval_)
app.command("study")(study.study)
app.command("report")(report.report)
app.command("ask")(ask.ask)
app.command("threshold")(threshold.threshold)
app.command("bench")(bench.bench)
app.command("lm-eval", context_settings=lm_eval.SETTINGS)(lm_eval.lm_eval)


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
