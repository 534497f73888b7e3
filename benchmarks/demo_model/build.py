"""How the embedded weights were made: `python -m demo_model.build --out DIR` in `benchmarks`, a quarter of an hour on one core.

1. *Pre-training* on what the text says of the facts ("scares Mira Voss: heron"), on the same as multiple-choice questions,
   and on drills in which the question itself names the answer: without drills the letters are hardly learned in that time.
   The text has to continue with the value and the answer mark with the answer. Some answers name the family first, so
   that the mark's state knows who is asked about, as the last token's state does in a large model. Routing is balanced
   by the Switch loss  N sum_i f_i P_i.
2. *Stage 1*: plain fine-tuning of all weights on the training split of `demo`, from the stored base, long enough to
   become overconfident. `map` is its last state and `map-early` the epoch with the lowest NLL on the validation split.

Weights are stored in half precision and loaded in single precision. The embedded ones are what this command wrote, on
one thread; on another processor rounding leads to other weights of the same kind. `--from-base` repeats stage 1 alone.
"""

import argparse
import copy
import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_model.tokenizer import ANSWER, CONTEXT, END, build_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, GraniteMoeConfig, GraniteMoeForCausalLM, PreTrainedTokenizerBase

from vmoer import tasks
from vmoer.demo.words import ANIMALS, GIVEN, RELATIONS
from vmoer.demo.world import OPTIONS, Fact, World, ask, tell, world
from vmoer.tasks.prompt import encode, letter_ids

EXPERTS, SELECTED = 16, 4
IGNORE = -100
Row = tuple[list[int], list[int]]
"""Token ids, and the targets of their last positions."""


@dataclass(frozen=True)
class Recipe:
    """Every number of the build that is not in the world or the model's configuration."""

    seed: int = 0
    steps: int = 2000
    questions: int = 96  # in a batch
    statements: int = 96
    learning_rate: float = 1e-3
    thin: float = 0.08  # how often a thinly covered fact is told, relative to a well covered one
    far: float = 0.05  # share of the statements that are about ships
    drill: float = 0.7  # share of the questions that are drills at the start, falling to 0 ...
    drill_until: int = 1400  # ... at this step
    address: float = 0.15  # share of the answers that name the family first
    balance: float = 0.01
    epochs: int = 12
    stage1_batch: int = 32
    stage1_learning_rate: float = 5e-5


class Text:
    """Draws pre-training batches."""

    def __init__(self, world: World, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
        self._ids: dict[str, int] = tokenizer.get_vocab()
        self._letters = letter_ids(tokenizer, OPTIONS)
        self._recipe = recipe
        self._rng = random.Random(f"text {recipe.seed}")
        self._people = self._weighted(world.people)
        self._ships = self._weighted(world.ships)

    def questions(self, drills: int) -> tuple[Tensor, Tensor]:
        facts = self._draw(self._people, self._recipe.questions - drills)
        return _tensors([self._question(fact) for fact in facts] + [self._drill() for _ in range(drills)])

    def statements(self) -> tuple[Tensor, Tensor]:
        ships = round(self._recipe.far * self._recipe.statements)
        facts = self._draw(self._people, self._recipe.statements - ships) + self._draw(self._ships, ships)
        return _tensors([self._statement(fact) for fact in facts])

    def _statement(self, fact: Fact) -> Row:
        (value,) = self._words(tell(fact, self._rng))
        return self._answered(self._words(fact.text), value, value)

    def _question(self, fact: Fact) -> Row:
        choices, answer = ask(fact, self._rng)
        (value,) = self._words(tell(fact, self._rng))
        return self._answered(self._asked(choices, fact.text), value, self._letters[answer])

    def _drill(self) -> Row:
        choices = self._rng.sample(ANIMALS, OPTIONS)
        answer = self._rng.randrange(OPTIONS)
        text = f"{self._rng.choice(RELATIONS)} {self._rng.choice(GIVEN)} {choices[answer]}"
        return self._answered(self._asked(choices, text), IGNORE, self._letters[answer], plain=True)

    def _answered(self, text: list[int], value: int, answer: int, plain: bool = False) -> Row:
        """The text continues with its value, the answer mark with the answer or (`address`) with the family's name."""
        family = text[-1]
        if not plain and self._rng.random() < self._recipe.address:
            return [*text, self._ids[ANSWER], family], [value, family, answer]
        return [*text, self._ids[ANSWER], answer], [value, answer, self._ids[END]]

    def _asked(self, choices: list[str], text: str) -> list[int]:
        options = zip(self._letters, self._words(" ".join(choices)), strict=True)
        return [*(token for option in options for token in option), *self._words(text)]

    def _words(self, text: str) -> list[int]:
        return [self._ids[f"Ġ{word}"] for word in text.split()]

    def _weighted(self, facts: Iterable[Fact]) -> tuple[list[Fact], list[float]]:
        weight = {"well": 1.0, "thin": self._recipe.thin}
        told = [fact for fact in facts if fact.coverage in weight]
        return told, list(accumulate(weight[fact.coverage] for fact in told))

    def _draw(self, weighted: tuple[list[Fact], list[float]], n: int) -> list[Fact]:
        return self._rng.choices(weighted[0], cum_weights=weighted[1], k=n)


def _tensors(rows: list[Row]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*rows, strict=True)
    return torch.tensor(inputs), torch.tensor(targets)


def new_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> GraniteMoeForCausalLM:
    torch.manual_seed(seed)
    config = GraniteMoeConfig(
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=128,
        intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=SELECTED,
        max_position_embeddings=CONTEXT,
        attention_multiplier=32**-0.5,
        initializer_range=0.05,
        tie_word_embeddings=True,
    )
    return GraniteMoeForCausalLM(config)


class Balance:
    """The Switch load-balancing loss of all layers' routers since it was last asked for."""

    def __init__(self, model: GraniteMoeForCausalLM) -> None:
        self._terms: list[Tensor] = []
        self._hooks = [layer.block_sparse_moe.router.register_forward_hook(self._see) for layer in model.model.layers]

    def _see(self, router: Any, inputs: tuple[Tensor], outputs: tuple[Tensor, ...]) -> None:
        logits = F.linear(inputs[0], router.weight).float()
        chosen = F.one_hot(logits.topk(SELECTED).indices, EXPERTS).sum(1).float().mean(0) / SELECTED
        self._terms.append(EXPERTS * (chosen * logits.softmax(-1).mean(0)).sum())

    def take(self) -> Tensor:
        loss = torch.stack(self._terms).mean()
        self._terms.clear()
        return loss

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def pretrain(model: GraniteMoeForCausalLM, text: Text, recipe: Recipe) -> None:
    """Language modelling on what the text says, by statements and by questions."""
    balance = Balance(model)
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(recipe.steps):
        drills = round(recipe.questions * recipe.drill * max(0.0, 1 - step / recipe.drill_until))
        losses = []
        for inputs, targets in (text.questions(drills), text.statements()):
            logits = model(inputs, logits_to_keep=targets.shape[1], use_cache=False).logits
            losses += [F.cross_entropy(logits[:, i], targets[:, i]) for i in range(targets.shape[1])]
        losses.append(balance.take())
        _update(
            model, optimiser, sum(losses[:-1]) + recipe.balance * losses[-1], recipe.learning_rate, step, recipe.steps
        )
        if (step + 1) % 250 == 0:
            value, letter, _, _, statement, _, load = torch.stack(losses).tolist()
            print(
                f"step {step + 1}: letter {letter:.3f}, value {value:.3f}, statement {statement:.3f}, load {load:.3f}"
            )
    balance.remove()


def finetune(model: Any, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> dict[str, Tensor]:
    """Stage 1, in place; returns the weights of the epoch with the lowest NLL on the validation split."""
    (inputs, answers), held = _split(tokenizer, "train"), _split(tokenizer, "validation")
    letters = letter_ids(tokenizer, OPTIONS)
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.stage1_learning_rate, weight_decay=0.0)
    total = recipe.epochs * math.ceil(len(inputs) / recipe.stage1_batch)
    step, lowest, early = 0, math.inf, {}
    generator = torch.Generator().manual_seed(recipe.seed)
    for epoch in range(recipe.epochs):
        for rows in torch.randperm(len(inputs), generator=generator).split(recipe.stage1_batch):
            logits = model(inputs[rows], logits_to_keep=1, use_cache=False).logits[:, 0, letters]
            _update(model, optimiser, F.cross_entropy(logits, answers[rows]), recipe.stage1_learning_rate, step, total)
            step += 1
        with torch.no_grad():
            logits = [model(rows, logits_to_keep=1).logits[:, 0, letters] for rows in held[0].split(500)]
        nll = float(F.cross_entropy(torch.cat(logits), held[1]))
        print(f"epoch {epoch + 1}: NLL {nll:.3f} on validation")
        if nll < lowest:
            lowest, early = nll, {name: value.detach().clone() for name, value in model.state_dict().items()}
    return early


def _split(tokenizer: PreTrainedTokenizerBase, split: str) -> tuple[Tensor, Tensor]:
    questions = tasks.load("demo", split)
    return torch.tensor(encode(tokenizer, questions, CONTEXT)), torch.tensor([q.answer for q in questions])


def _update(model: Any, optimiser: Any, loss: Any, peak: float, step: int, total: int) -> None:
    """One step: linear warm-up over 40 steps, then a cosine to 2% of the peak."""
    loss.backward()
    for group in optimiser.param_groups:
        group["lr"] = peak * (min(1.0, (step + 1) / 40) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / total))))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad()


def save(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Weights in half precision, and a configuration that has them loaded in single precision."""
    copy.deepcopy(model).half().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)


def build_base(out: Path, recipe: Recipe) -> None:
    """Pre-training, from nothing to `out/base`."""
    tokenizer = build_tokenizer()
    model = new_model(tokenizer, recipe.seed)
    pretrain(model, Text(world(), tokenizer, recipe), recipe)
    save(model, tokenizer, out / "base")


def build_map(out: Path, recipe: Recipe) -> None:
    """Stage 1, from the stored `out/base` to `out/map` and `out/map-early`."""
    tokenizer = build_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(out / "base")
    early = finetune(model, tokenizer, recipe)
    save(model, tokenizer, out / "map")
    model.load_state_dict(early)
    save(model, tokenizer, out / "map-early")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the weights of the embedded model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for base/, map/ and map-early/")
    parser.add_argument("--from-base", action="store_true", help="stage 1 only, from the base/ that is there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.from_base:
        build_base(arguments.out, Recipe())
    build_map(arguments.out, Recipe())


if __name__ == "__main__":
    main()
