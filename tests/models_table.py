"""Writes docs/models.md from what the tests cover: `python tests/models_table.py > docs/models.md`."""

import importlib
import re
import sys
from pathlib import Path
from typing import NamedTuple

import transformers

sys.path.insert(0, str(Path(__file__).parent / "live"))
sys.path.insert(0, str(Path(__file__).parent))
import test_packed
import tiny

from vmoer import gates
from vmoer.gates.rules import Rule
from vmoer.gates.table import REFUSED, RULES


class Case(NamedTuple):
    """A way a base model or a batch may come, what happens, and the test that shows it."""

    what: str
    answer: str
    test: str
    how: str


QUANTISED = (
    Case(
        "bitsandbytes, 8 and 4 bits",
        "works: routers stay in full precision, and what was trained on the quantised base loads on the full one",
        "test_quantised.test_bitsandbytes",
        "the library itself, on a CPU; skipped where it is not installed",
    ),
    Case(
        "bitsandbytes, 4 bits, on a processor with AVX512-BF16",
        "inference works; training is refused: its layers for that processor have no backward pass",
        "test_quantised.test_layers_without_a_backward_pass_are_not_trained_through",
        "layers marked as it marks them",
    ),
    Case(
        "FP8 linear layers and experts (`FineGrainedFP8Config`)",
        "works",
        "test_quantised.test_fp8_layers",
        "transformers' own FP8 modules; their GPU kernel is replaced by a reference, so not run on a GPU",
    ),
    Case(
        "an FP8 checkpoint without a GPU",
        "works: transformers loads it in bfloat16",
        "test_quantised.test_an_fp8_checkpoint_without_a_gpu",
        "on a CPU",
    ),
    Case(
        "GGUF (`gguf_file=`, or the path of the file in place of a model)",
        "works: transformers unpacks the blocks. Routers that were quantised in the file are other routers: attaching works, "
        "loading those of the original is refused",
        "test_quantised.test_gguf",
        "a Q8_0 file of qwen3moe, on a CPU; blocks kept packed by the `kernels` package are not tested",
    ),
    Case(
        "a quantiser that took the router too (a linear layer inside it)",
        "refused: leave it out (`modules_to_not_convert`, `llm_int8_skip_modules`)",
        "test_quantised.test_fp8_over_a_router",
        "HunYuan's gate in float8 and, with bitsandbytes, in 4 bits",
    ),
    Case(
        "MXFP4 blocks (gpt-oss)",
        "refused: they route by a kernel of their own",
        "test_quantised.test_mxfp4_routes_by_itself",
        "transformers' own block, which is not run",
    ),
    Case(
        "an MXFP4 checkpoint with `Mxfp4Config(dequantize=True)`",
        "works: it is an ordinary gpt-oss then",
        "test_quantised.test_an_mxfp4_checkpoint_without_its_kernels",
        "on a CPU",
    ),
    Case(
        "a block whose forward was replaced (fused kernels)",
        "works where it calls the router, refused where it does not",
        "test_quantised.test_a_replaced_block_that_forgets_its_router",
        "on a CPU",
    ),
)
MAPPED = (
    Case(
        "DeepSeek-MoE-16B (`deepseek-ai/deepseek-moe-16b-base`, `-chat`) and folders of its layout (`model_type` is `deepseek`)",
        "works by name in every command and with `open_model`, without remote code: it becomes a `Qwen2MoeForCausalLM` that "
        "computes the same, and is saved as one. A checkpoint with a tensor too few or too many is refused",
        "test_deepseek.test_the_logits_are_those_of_a_forward_pass_written_by_hand",
        "a tiny checkpoint in the hub's layout; the contract with every method runs on it too",
    ),
)
PACKED = (
    Case(
        "several documents in one row, `position_ids` restarting, no mask, `use_cache=False` (`DataCollatorWithFlattening`)",
        "works: each document is routed as if it were alone, in inference and training",
        "test_packed.test_each_document_is_routed_as_if_alone",
        "all whole models above but those below (gpt_oss with its masks written out)",
    ),
    Case(
        "the same with a 2-D mask of ones, or with a cache",
        "positions restart all the same, but transformers lets documents see each other, attached or not; "
        "a 4-D mask keeps them apart",
        "test_packed.test_a_mask_of_ones_changes_no_position",
        "on a CPU",
    ),
    Case(
        "`cu_seq_lens_q` or `seq_idx` without `position_ids`",
        "refused: noise is keyed by the position in the document",
        "test_packed.test_what_is_refused",
        "",
    ),
    Case(
        '`vmoer.predict`, or `vmoer.fit(tokens="last")`, on packed rows',
        "refused: they read one prompt a row; `vmoer.fit` over all tokens works",
        "test_packed.test_what_is_refused",
        "",
    ),
)


def _families() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name in re.findall(r"^class (\w+)\(", file.read_text(), re.M):
            if name in RULES or name in REFUSED:
                found.setdefault(name, []).append(file.parent.name)
    return found


def _rule(rule: Rule) -> str:
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
    lines += ["", "## Models that transformers has no class for", "", *_cases(MAPPED)]
    lines += ["", "## Quantised bases", "", *_cases(QUANTISED), "", "## Packed sequences", "", *_cases(PACKED)]
    mixing = [name for name in tiny.ARCHITECTURES if test_packed.mixes(name)]
    lines += [
        "",
        f"With transformers {transformers.__version__} on a CPU these let packed documents see each other by themselves,",
    ]
    lines += [f"nothing attached (`test_packed.mixes`): {', '.join(mixing)}."]
    return "\n".join(lines) + "\n"


def _cases(cases: tuple[Case, ...]) -> list[str]:
    """A table; a test that does not exist is an error."""
    lines = ["| what | answer | test |", "|---|---|---|"]
    for case in cases:
        module, _, name = case.test.partition(".")
        if not callable(getattr(importlib.import_module(module), name)):
            raise TypeError(case.test)
        how = f": {case.how}" if case.how else ""
        lines.append(f"| {case.what} | {case.answer} | `{case.test}`{how} |")
    return lines


if __name__ == "__main__":
    sys.stdout.write(table())
