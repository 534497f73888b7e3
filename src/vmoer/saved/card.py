"""The card beside a saved router: the README that the hub shows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vmoer.files import read_json
from vmoer.saved.fetch import is_repository

TAGS = ("vmoer", "mixture-of-experts", "uncertainty", "calibration", "variational-routing")
CARD = """---
{matter}
---

# {method} routers for {base}

Variational routers for chosen layers of a Mixture-of-Experts language model: answers averaged over routing, and signals for each
token. Everything else of the base model is unchanged. What they are worth on your task is to be measured, against an output
temperature first.

| | |
|---|---|
{rows}

```python
import vmoer
from vmoer.models import open_model

model = open_model("{base}").model
model = vmoer.load(model, "REPOSITORY_OR_FOLDER")  # refused on any other base model
```
"""
METRICS = ("accuracy", "nll", "brier", "ece", "ece_floor", "debiased_ece")


def card(description: Mapping[str, Any], about: Mapping[str, Any] | None = None) -> str:
    """The README of a saved router.

    Args:
        description: the content of `router.json`.
        about: the content of `run.json` (model, task, preset, seed, stage2), and `metrics`, a map from names to numbers.
    """
    about = about or {}
    config = dict(description["config"])
    method, layers = config.pop("method"), config.pop("layers")
    base = description.get("base_model")
    matter = [f"base_model: {base}"] if _on_the_hub(base) else []
    matter += ["library_name: vmoer", "tags:", *(f"- {tag}" for tag in TAGS)]
    facts = {
        "base model": f"`{base}`" if base else "not named; recognised by the fingerprint of its router weights",
        "method": f"`{method}`",
        "layers": ", ".join(map(str, layers)),
        "settings": ", ".join(f"{name} = {value}" for name, value in config.items()),
        "adapter": "a LoRA adapter is part of this folder" if description["adapter"] else "none",
        "task": about.get("task"),
        "preset": about.get("preset"),
        "validation NLL": _number((about.get("stage2") or {}).get("best_validation_nll")),
        "library": f"vmoer {description['vmoer']}",
    }
    facts |= {f"metric: {name}": _number(value) for name, value in (about.get("metrics") or {}).items()}
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value)
    return CARD.format(matter="\n".join(matter), method=method, base=base or "BASE", rows=rows)


def _number(value: Any) -> str | None:
    return None if value is None else f"{value:.4g}"


def _on_the_hub(name: Any) -> bool:
    return isinstance(name, str) and is_repository(name) and not Path(name).exists()


def known(folder: Path) -> dict[str, Any]:
    """The folder's own `run.json`, with the test metrics of its `metrics.json`: what `card` takes as `about`."""
    about: dict[str, Any] = {}
    if (folder / "run.json").exists():
        about = read_json(folder / "run.json")
    if (folder / "metrics.json").exists():
        rows = read_json(folder / "metrics.json")
        own = [row for row in rows if row["method"] == about.get("method") and row["metric"] in METRICS]
        about["metrics"] = {f"{row['metric']} ({row['task']})": row["value"] for row in own if row["value"] is not None}
    return about
