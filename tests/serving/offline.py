"""Run by the tests in a process of its own: vLLM on prompts, its answers and rows into files.

python offline.py SPEC OUT     SPEC is JSON: model, router, and by name the cases with their options and prompts
"""

import gc
import json
import sys
from pathlib import Path

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner


def as_on_a_gpu(runner: MoERunner) -> object:
    """One operator, which torch.compile does not look into. On a CPU vLLM has its content compiled."""
    return torch.ops.vllm.moe_forward if runner._shared_experts is None else torch.ops.vllm.moe_forward_shared


def main(spec: dict, out: Path) -> None:
    own = MoERunner._select_forward
    for case, asked in spec.items():
        MoERunner._select_forward = as_on_a_gpu if asked.get("as_on_a_gpu") else own
        routed = {"load_format": "vmoer", "model_loader_extra_config": {"router": asked["router"]}}
        llm = LLM(
            asked["model"],
            max_model_len=256,
            max_num_seqs=8,
            distributed_executor_backend=asked.get("executor", "uni"),
            enable_return_routed_experts=True,
            kernel_config={"enable_jit_warmup": False},  # 0.33 warms up kernels that Triton's interpreter cannot run
            **routed if asked["router"] else {},
            **{"dtype": "float32", "enforce_eager": True} | asked.get("options", {}),
        )
        found = []
        for number, prompts in enumerate([*asked["rounds"], *asked.get("sampled", [])]):
            n, samples = asked.get("new", 12), number >= len(asked["rounds"])
            how = {"temperature": 1.0, "seed": 5, "logprobs": 0} if samples else {"temperature": 0}
            wanted = SamplingParams(**how, max_tokens=n, min_tokens=n, ignore_eos=True)
            answers = llm.generate(prompts, wanted, use_tqdm=False)
            for place, answer in enumerate(answers):
                np.save(out / f"{case}.{number}.{place}.npy", answer.outputs[0].routed_experts)
            ids = [[*answer.prompt_token_ids, *answer.outputs[0].token_ids] for answer in answers]
            found.append({"ids": ids, "cached": [answer.num_cached_tokens for answer in answers]})
            if samples:
                firsts = ([next(iter(said.values())) for said in answer.outputs[0].logprobs] for answer in answers)
                found[-1]["log_probs"] = [[first.logprob for first in row] for row in firsts]
        (out / f"{case}.json").write_text(json.dumps(found))
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
