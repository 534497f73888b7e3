"""What is minimised, and how well it does on validation.

    elbo         -log p(y | one routing sample)                   + beta KL      (the paper's, S = 1)
    predictive   -log (1/M) sum_m p(y | routing sample m)         + beta KL      (ours: the likelihood that averaging answers has)

p(y) is the softmax over the answer letters' logits at the last prompt token: what is evaluated, so that its NLL is the score
reported. Over the whole vocabulary the loss would have the term -log p(some letter) besides, which teaches format, is soon
near zero, and is not calibration.

Each micro-batch gives its *share* of the step's loss: answers are divided by the rows, the KL by the unmasked tokens of the
whole batch, so shares of accumulation steps and processes add up to the loss of one large batch. Noise is keyed by the
optimiser step, the row's place in that whole batch and its position; pass m of M at step s has the key s M + m.

Shapes: B rows, C letters, M passes, L layers.
"""

import math
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vmoer.live import adapters
from vmoer.live.attach import attachment_of, record, sampled
from vmoer.live.inputs import keeps_logits
from vmoer.live.recording import Record
from vmoer.tasks.batches import by_length
from vmoer.training.data import Batch, Examples, collate
from vmoer.training.workers import Workers

Objective = Literal["elbo", "predictive"]


def answer_log_probs(model: Any, batch: Batch) -> Tensor:
    """log p over the letters at each prompt's end, [B, C]; -inf at letters that are no option."""
    extra = {"logits_to_keep": batch.columns_U} if keeps_logits(model) else {}
    logits = model(**batch.inputs, **extra, use_cache=False).logits
    column_B = batch.place_B if logits.shape[1] == len(batch.columns_U) else batch.last_B
    logits_BC = logits[torch.arange(len(column_B), device=column_B.device), column_B][:, batch.letters_C]
    return torch.log_softmax(logits_BC.float().masked_fill(batch.beyond_BC, -math.inf), -1)


def answer_nll(log_probs_MBC: Tensor, answers_B: Tensor) -> Tensor:
    """-log (1/M) sum_m p_m(y), [B]."""
    index = answers_B.expand(len(log_probs_MBC), -1).unsqueeze(-1)
    log_p_MB = log_probs_MBC.gather(-1, index).squeeze(-1)
    return math.log(len(log_p_MB)) - torch.logsumexp(log_p_MB, 0)


def micro_loss(
    model: nn.Module, batch: Batch, *, step: int, first_row: int, rows: int, tokens: int, passes: int = 1
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the step's loss, and what to log of it: `nll` and `kl` are shares, signals are means."""
    if attachment_of(model) is None:
        nll = answer_nll(answer_log_probs(model, batch).unsqueeze(0), batch.answers_B).sum() / rows
        return nll, {"loss": nll.detach(), "nll": nll.detach()}
    log_probs, kl = [], torch.zeros((), device=batch.answers_B.device)
    for number in range(passes):
        with record(model, step=step * passes + number, first_row=first_row) as rec:
            log_probs.append(answer_log_probs(model, batch))
        kl = kl + rec.kl(tokens=tokens) / passes
    if (penalty := adapters.divergence(model)) is not None:
        kl = kl + penalty * len(batch.answers_B) / rows
    nll = answer_nll(torch.stack(log_probs), batch.answers_B).sum() / rows
    loss = nll + kl
    return loss, {"loss": loss.detach(), "nll": nll.detach(), "kl": kl.detach(), **signals(rec)}


@torch.no_grad()
def signals(rec: Record) -> dict[str, Tensor]:
    """Means over unmasked tokens, without reading anything back from the device; quantiles of the temperature."""
    found, mask_BT = rec.signals, rec.mask
    out = {"gate_entropy_L": torch.where(mask_BT, found["gate_entropy"], math.nan).nanmean((1, 2))}
    if "logit_variance" in found:
        out["logit_variance"] = torch.where(mask_BT, found["logit_variance"], math.nan).nanmean()
    if "temperature" in found:
        temperature = torch.where(mask_BT, found["temperature"], math.nan).reshape(-1)
        at = torch.linspace(0.05, 0.95, 3, device=temperature.device)  # a tensor of numbers would wait for the device
        low, mid, high = torch.nanquantile(temperature, at).unbind()
        out |= {"temperature_q05": low, "temperature_q50": mid, "temperature_q95": high}
    return out


@torch.no_grad()
def evaluate(
    model: nn.Module, examples: Examples, workers: Workers, *, passes: int = 1, seed: int = 0, batch_tokens: int = 16384
) -> Tensor:
    """log p over the letters for every question, [n, C] on the CPU: averaged in the router, or over M whole passes.

    Batches are the same whatever the number of processes. A method that draws fresh noise is seeded batch by batch, and
    the caller's generators are left as they were.
    """
    training = model.training
    model.eval()
    batches = by_length(examples.lengths, batch_tokens)
    out = torch.zeros(len(examples), len(examples.letters), device=workers.device)
    devices = [workers.device] if workers.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for start in range(0, len(batches), workers.size):
            mine = start + workers.rank
            rows = batches[mine if mine < len(batches) else 0]  # under FSDP2 all processes must run equally often
            batch = collate(examples, rows, workers.device)
            torch.manual_seed(seed * 1_000_003 + mine)
            found = []
            for number in range(passes):
                with sampled(model, number) if passes > 1 else nullcontext():
                    found.append(answer_log_probs(model, batch))
            if mine < len(batches):
                mean = torch.logsumexp(torch.stack(found), 0) - math.log(passes)
                out[torch.tensor(rows, device=out.device)] = mean.clamp_min(torch.finfo(mean.dtype).min)
    model.train(training)
    out = workers.sum_(out).cpu().double()
    beyond = torch.arange(out.shape[1]) >= torch.tensor(examples.options).unsqueeze(1)
    return out.masked_fill(beyond, -math.inf)
