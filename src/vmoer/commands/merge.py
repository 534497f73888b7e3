"""`vmoer merge RUN --out DIR`: a run's adapter in the weights of its base model."""

from pathlib import Path
from typing import Annotated

import typer

from vmoer.commands._shared import Dtype, quiet


def merge(
    run: Annotated[str, typer.Argument(help="A run of vmoer train, saved routers, or a repository of them.")],
    out: Annotated[Path, typer.Option(help="The folder to write, which must not be there yet.")],
    dtype: Dtype = None,
) -> None:
    """Write a run as one folder: the base model with the adapter in its weights, the tokenizer, and the routers.

    vmoer serve DIR --router DIR then serves it. By default the weights keep the dtype of the base model's files.
    """
    from vmoer.serving import merging

    quiet()
    folder = merging.merge(run, out, dtype=dtype)
    print(f"{folder}: vmoer serve {folder} --router {folder}")
