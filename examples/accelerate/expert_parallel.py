"""Prompts answered with the experts spread over processes. Every process runs every router, and they must agree.

    accelerate launch --config_file examples/accelerate/expert-parallel.yaml \
        examples/accelerate/expert_parallel.py MODEL [--router RUN] "first prompt" "second prompt"

MODEL is what `from_pretrained` reads; RUN the folder of the routers, by default MODEL itself (as `vmoer merge` writes it).
"""

import argparse

import torch
import transformers
from accelerate import PartialState
from transformers.distributed import DistributedConfig

import vmoer


def spread_experts(processes: int) -> DistributedConfig:
    """The experts shared out, everything else whole on each process. Drop `tp_plan` to split the dense layers too."""
    if "ep_size" in DistributedConfig.__dataclass_fields__:
        return DistributedConfig(tp_size=processes, ep_size=processes, tp_plan={})
    return DistributedConfig(tp_size=processes, enable_expert_parallel=True)  # transformers before 5.19


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--router")
    parser.add_argument("--dtype", default="bfloat16" if torch.accelerator.is_available() else "float32")
    asked = parser.parse_args()

    processes = PartialState(cpu=not torch.accelerator.is_available())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    spread = spread_experts(processes.num_processes) if processes.num_processes > 1 else None
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(asked.model, dtype=asked.dtype, distributed_config=spread, trust_remote_code=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(asked.model, padding_side="left", trust_remote_code=False)
    vmoer.load(model, asked.router or asked.model)

    batch = tokenizer(asked.prompts, return_tensors="pt", padding=True).to(processes.device)
    batch.pop("token_type_ids", None)
    with vmoer.record(model) as rec:
        log_probs = vmoer.predict(model, dict(batch))
    if processes.is_main_process:
        for row, prompt in enumerate(asked.prompts):
            token = int(log_probs[row].argmax())
            said = f"{tokenizer.decode([token])!r} with probability {log_probs[row, token].exp():.3f}"
            signals = ", ".join(f"{name} {value[:, row, -1].mean():.4g}" for name, value in rec.signals.items())
            print(f"{prompt} -> {said}; {signals}", flush=True)
    processes.wait_for_everyone()
    processes.destroy_process_group()


if __name__ == "__main__":
    main()
