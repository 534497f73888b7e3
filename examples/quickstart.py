"""The whole life of a variational router on a tiny random Mixture-of-Experts: attach, train, predict, save, load, detach."""

import tempfile

import torch
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

import vmoer

torch.manual_seed(0)
config = GraniteMoeConfig(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_local_experts=8,
    num_experts_per_tok=2,
)
model = GraniteMoeForCausalLM(config)
batch = {"input_ids": torch.randint(3, 100, (8, 16)), "attention_mask": torch.ones(8, 16, dtype=torch.long)}

vmoer.attach(model, vmoer.FullCovariance(layers=[1, 3], beta=0.01))  # in place; everything else is frozen
vmoer.fit(model, [batch])  # what needs data but no gradient: the novelty signal

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
model.train()
for step in range(20):
    with vmoer.record(model, step=step) as rec:
        loss = model(**batch, labels=batch["input_ids"]).loss + rec.kl()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}  beta * KL {rec.kl().item():.5f}")

model.eval()
with vmoer.record(model) as rec, torch.no_grad():
    model(**batch)
for name, value in rec.signals.items():
    print(f"{name:18s} [layer, batch, token] = {tuple(value.shape)}, mean {value.mean().item():.4f}")

for averaging in ("router", "answer", "full"):
    log_probs = vmoer.predict(model, batch, averaging=averaging, passes=8)
    print(f"averaging={averaging:7s} most likely next tokens {log_probs.argmax(-1).tolist()}")

with tempfile.TemporaryDirectory() as run:
    vmoer.save(model, run)
    vmoer.detach(model)  # the model is itself again, bit for bit
    vmoer.load(model, run)
print("saved, detached and loaded again")
