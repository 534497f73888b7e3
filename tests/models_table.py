"""Writes docs/models.md from what the tests cover: `python tests/models_table.py > docs/models.md`."""

import re
import sys
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).parent))
import tiny

from vmoer import gates
from vmoer.gates.table import REFUSED, RULES


def _families() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name in re.findall(r"^class (\w+)\(", file.read_text(), re.M):
            if name in RULES or name in REFUSED:
                found.setdefault(name, []).append(file.parent.name)
    return found


def _rule(rule: gates.Rule) -> str:
    score = rule.score if rule.score in ("softmax", "sigmoid") else "by configuration"
    parts = ["sparsemixer" if rule.mixer else score]
    parts += ["correction bias"] * (rule.bias is not None) + ["groups"] * (rule.groups is not None)
    normalised = {True: "normalised", False: ""}.get(rule.normalise, "normalised by flag")  # type: ignore[arg-type]
    parts += (
        [normalised] * bool(normalised)
        + ["scaled"] * (rule.scale != 1.0)
        + ["dense scores"] * (rule.returns == "dense")
    )
    return ", ".join(parts)


def table() -> str:
    families = _families()
    whole = {gates.find(tiny.model(name))[0].kind for name in tiny.ARCHITECTURES}
    lines = [
        "# Models",
        "",
        "Written by `python tests/models_table.py > docs/models.md`; `make test` checks that it is current.",
        "",
        "*Whole model*: a tiny random model of the architecture passes `tests/test_contract.py` with every method, in training",
        "and inference, float32 and bfloat16. *Router*: the scoring rule reproduces the router class's own experts and weights",
        "on random and on modified logits (`tests/gates/test_gates.py`), and attach checks it again on your model.",
        "",
        "| family | router class | rule | tested as |",
        "|---|---|---|---|",
    ]
    for name in sorted(RULES, key=lambda n: families[n][0]):
        tested = "whole model" if name in whole else "router"
        lines.append(f"| {', '.join(families[name])} | `{name}` | {_rule(RULES[name])} | {tested} |")
    lines += ["", "Cannot be attached, and why:", "", "| family | router class | reason |", "|---|---|---|"]
    lines += [
        f"| {', '.join(families[n])} | `{n}` | {REFUSED[n]} |" for n in sorted(REFUSED, key=lambda n: families[n][0])
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
