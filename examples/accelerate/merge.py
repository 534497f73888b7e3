"""A run of `vmoer train` as one folder without an adapter: `python examples/accelerate/merge.py RUN OUT [DTYPE]`.

The experts' LoRA updates cannot be laid over experts that are spread over processes, so they are added to the weights before.
OUT holds the model with them, its tokenizer, and the routers; `from_pretrained(OUT)` and then `vmoer.load(model, OUT)` open it.
"""

import sys

import vmoer
from vmoer.models import open_model


def merge(run: str, out: str, dtype: str = "auto") -> None:
    opened = open_model(run, device="cpu", dtype=dtype)
    model = opened.model.merge_and_unload() if hasattr(opened.model, "merge_and_unload") else opened.model
    model.save_pretrained(out)  # the routers' parameters stay out of it
    opened.tokenizer.save_pretrained(out)
    vmoer.save(model, out)


if __name__ == "__main__":
    merge(*sys.argv[1:])
