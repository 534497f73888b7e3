"""Several documents in one row, positions restarting: each must be routed as if it were alone.

The oracle is the same model over the documents one by one. Packing is transformers' own (`DataCollatorWithFlattening`), and so is
keeping the documents apart in attention: by `position_ids` where there is neither a cache nor a 2-D mask.
"""

from typing import Any

import pytest
import tiny
import torch
from test_contract import METHODS, UNTRAINED, gradients, prepare
from torch import Tensor
from transformers import DataCollatorWithFlattening

import vmoer
from vmoer.errors import InputError
from vmoer.live.context import DOCUMENT, documents

LENGTHS = (9, 1, 6, 11)
HYBRID = ("granitemoehybrid", "jamba")  # their state-space layers run over a whole row
MASKED = ("gpt_oss",)  # builds its mask without looking at position_ids


def texts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Tensor]:
    padded = tiny.batch(lengths, seed=seed)
    return [row[:n] for row, n in zip(padded["input_ids"], lengths, strict=True)]


def packed(rows: list[Tensor], **options: Any) -> dict[str, Any]:
    batch = DataCollatorWithFlattening(return_tensors="pt", **options)([{"input_ids": row} for row in rows])
    batch.pop("labels")
    return {**batch, "use_cache": False}


def blocks(batch: dict[str, Any]) -> Tensor:
    """The mask that keeps documents apart, written out to be added to the scores: [B, 1, T, T]."""
    numbers = documents(batch["position_ids"], None)
    seen = (numbers.unsqueeze(-1) == numbers.unsqueeze(1)).tril().unsqueeze(1)
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def mixes(name: str) -> bool:
    """Whether the plain model, nothing attached, lets a document see the one packed before it."""
    model, rows = tiny.model(name), texts((9, 11))
    with torch.no_grad():
        together = model(**packed(rows)).logits[0]
        alone = [model(input_ids=row.unsqueeze(0), use_cache=False).logits[0] for row in rows]
    torch.testing.assert_close(together[:9], alone[0], atol=1e-4, rtol=0)
    return bool((together[9:] - alone[1]).abs().max() > 1e-2)


def run(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    with vmoer.record(model) as rec, torch.no_grad():
        logits = model(**batch).logits
    return logits, rec.experts.sort(-1).values, rec.signals


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *((name, key) for name in tiny.ARCHITECTURES if name not in HYBRID for key in ("vglr-fc", "vtsr")),
        *(("granitemoe", key) for key in METHODS if key not in ("vglr-fc", "vtsr")),
    ],
)
def test_each_document_is_routed_as_if_alone(name: str, key: str) -> None:
    model, rows = prepare(name, key), texts()
    batch = packed(rows)
    if name in MASKED:
        batch["attention_mask"] = dict.fromkeys(("full_attention", "sliding_attention"), blocks(batch))
    logits, experts, signals = run(model, batch)
    start = 0
    for row in rows:
        place = slice(start, start := start + len(row))
        alone, chosen, said = run(model, {"input_ids": row.unsqueeze(0), "use_cache": False})
        torch.testing.assert_close(logits[0, place], alone[0], atol=1e-4, rtol=0)
        assert torch.equal(experts[:, 0, place], chosen[:, 0])
        for signal, value in said.items():
            torch.testing.assert_close(signals[signal][:, 0, place], value[:, 0], atol=1e-4, rtol=1e-4)


def test_a_mask_of_ones_changes_no_position() -> None:
    """With a 2-D mask transformers attends across documents, attached or not; with a 4-D one it does as the mask says."""
    model, rows = prepare("granitemoe", "vtsr"), texts()
    batch = packed(rows)
    apart = run(model, batch)
    with vmoer.record(model) as rec, torch.no_grad():
        model(**batch, attention_mask=torch.ones_like(batch["input_ids"]))
    assert torch.equal(rec.passes[0][0].positions_T, torch.cat([torch.arange(len(row)) for row in rows]))
    logits, experts, _ = run(model, batch | {"attention_mask": blocks(batch)})
    torch.testing.assert_close(logits, apart[0], atol=1e-5, rtol=0)
    assert torch.equal(experts, apart[1])


@pytest.mark.parametrize("name", HYBRID)
def test_hybrids_mix_documents_by_themselves(name: str) -> None:
    """Which is why they are not in the test above; docs/models.md says so."""
    assert mixes(name)


def loss_of(model: Any, batch: dict[str, Any], first_row: int, tokens: int) -> Tensor:
    """A sum over tokens, so that documents add up, and their share of the KL."""
    with vmoer.record(model, step=4, first_row=first_row) as rec:
        logits = model(**batch).logits
        return torch.log_softmax(logits, -1)[..., 7].sum() / tokens + rec.kl(tokens)


@pytest.mark.parametrize("name", ["granitemoe", "deepseek_v3"])
@pytest.mark.parametrize("key", [key for key in METHODS if key not in UNTRAINED])
def test_training_draws_for_each_document(name: str, key: str) -> None:
    """The gradient of two packed rows is that of their documents one by one, the k-th of row r as row r + k * DOCUMENT."""
    model = prepare(name, key).train()
    rows = [texts(), texts((8, 19), seed=1)]
    both = [packed(row) for row in rows]
    whole = {name: torch.cat([batch[name] for batch in both]) for name in ("input_ids", "position_ids")}
    tokens = whole["input_ids"].numel()
    loss_of(model, whole | {"use_cache": False}, 0, tokens).backward()
    together = gradients(model)
    model.zero_grad()
    for r, row in enumerate(rows):
        for k, document in enumerate(row):
            batch = {"input_ids": document.unsqueeze(0), "use_cache": False}
            loss_of(model, batch, r + k * DOCUMENT, tokens).backward()
    for n, g in gradients(model).items():
        assert (g - together[n]).norm() <= 1e-4 * together[n].norm() + 1e-7, n


def test_padding_makes_no_document() -> None:
    """Either side, positions counted from the mask or given, whatever they say under the padding: one document a row."""
    for side in ("left", "right"):
        batch = tiny.batch(side=side)
        mask = batch["attention_mask"].bool()
        counted = (mask.long().cumsum(-1) - 1).clamp_min(0)
        for positions in (counted, counted.masked_fill(~mask, 1)):
            assert not documents(positions, mask).any()
    assert documents(torch.tensor([[0, 1, 0, 0, 1, 2, 1]]), None).tolist() == [[0, 0, 1, 2, 2, 2, 3]]


def test_fit_reads_every_document_alone() -> None:
    rows = texts()
    padded = tiny.batch(LENGTHS)
    fitted = []
    for batch in (padded, packed(rows)):
        model = prepare("granitemoe", "vglr-mf")
        vmoer.fit(model, [{k: v for k, v in batch.items() if isinstance(v, Tensor)}], rank=5)
        fitted.append(run(model, packed(rows))[2]["novelty"])
    torch.testing.assert_close(*fitted, atol=1e-4, rtol=1e-4)


def test_the_trainer_takes_packed_batches(tmp_path: Any) -> None:
    """One SGD step of VMoERTrainer over a flattened batch is the step taken by hand."""
    from transformers import TrainingArguments

    from vmoer.live.attach import routers_of

    model, rows = prepare("granitemoe", "vglr-fc", beta=0.1), texts()
    by_hand = prepare("granitemoe", "vglr-fc", beta=0.1).train()
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=4, learning_rate=0.5, optim="sgd", use_cpu=True,
        save_strategy="no", report_to=[], lr_scheduler_type="constant", max_grad_norm=0.0, disable_tqdm=True,
    )  # fmt: skip
    collate = DataCollatorWithFlattening(return_tensors="pt")
    data = [{"input_ids": row.tolist()} for row in rows]
    trainer = vmoer.VMoERTrainer(model, arguments, train_dataset=data, data_collator=collate)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)  # type: ignore[method-assign]
    trainer.train()
    with vmoer.record(by_hand, step=0) as rec:
        loss = by_hand(**collate(data), use_cache=False).loss + rec.kl()
    loss.backward()
    for layer, router in routers_of(by_hand).items():
        for (name, p), q in zip(router.named_parameters(), routers_of(model)[layer].parameters(), strict=True):
            torch.testing.assert_close(q, p - 0.5 * p.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_what_is_refused() -> None:
    model, rows = prepare("granitemoe", "vglr-fc"), texts()
    batch = packed(rows, return_position_ids=False, return_flash_attn_kwargs=True)
    with pytest.raises(InputError, match="need position_ids that restart"):
        run(model, batch)
    inputs = {k: v for k, v in packed(rows).items() if isinstance(v, Tensor)}
    for averaging in ("router", "answer", "full"):
        with pytest.raises(InputError, match="these rows hold several"):
            vmoer.predict(model, inputs, averaging=averaging)
    with pytest.raises(InputError, match="these rows hold several"):
        vmoer.fit(model, [inputs], tokens="last")
