"""`vmoer serve MODEL --router RUN [vLLM's own options]`: an OpenAI-compatible server with an uncertainty for every token."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from vmoer.commands._shared import NoCalibrator, quiet

SETTINGS: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Options that are not ours go through to vLLM."""


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The base model: a hub id or a folder, as vLLM takes it.")],
    router: Annotated[str, typer.Option(help="A run of vmoer train, saved routers, or a repository of them.")],
    threshold: Annotated[
        Path | None, typer.Option(help="A threshold file of vmoer threshold: answers then say whether to abstain.")
    ] = None,
    no_calibrator: NoCalibrator = False,
) -> None:
    """Serve a model on vLLM with the routers of a run; every other option is vLLM's own (vllm serve --help).

    Clients ask by extra_body={"uncertainty": true}. /vmoer is a page to try it, /metrics has histograms of the signals.
    """
    from vmoer.serving import launch

    quiet()
    command = launch.prepare(model, router, threshold, context.args, calibrated=not no_calibrator)
    os.execve(command.arguments[0], command.arguments, command.environment)
