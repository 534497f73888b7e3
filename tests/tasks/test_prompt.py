"""Prompts over small tokenizers of the three kinds that models have.

Oracles: the letter's token written by hand for each tokenizer and template; the template's own rendering of an answered
conversation, whose tokens must begin with prompt + letter; and the text, which must come back whole.
"""

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tiny_letters import tiny_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from vmoer.errors import InputError
from vmoer.tasks import LETTERS, Question, load
from vmoer.tasks.prompt import SYSTEM, ask_with, encode, letter_ids, prompt

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<|channel|>", "<|message|>"]
TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
CHATML = (
    "{% for m in messages %}" + TURN + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
DROPS_SYSTEM = CHATML.replace("messages %}", "messages if m['role'] != 'system' %}", 1)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
)
CHANNELS = (
    "Date {{ strftime_now('%Y-%m-%d') }}\n{% for m in messages %}<|im_start|>{{ m['role'] }}"
    "{% if m['role'] == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
THINKS = (
    CHATML[: -len("{% endif %}")]
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

QUESTION = Question("q1", " Which is wet? ", ("fire", "water", "sand"), 1, "quiz", "test")


def wrap(core: Tokenizer, template: str | None, bos: bool = False) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if bos:
        ids = [(token, core.token_to_id(token)) for token in ("<s>", "</s>")]
        core.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def byte_level(template: str | None = None, letters: str = LETTERS, bos: bool = False) -> PreTrainedTokenizerFast:
    """GPT-2's kind: a space belongs to the word after it, here only for the given letters."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġ{letter}" for letter in letters), "xB"]
    merges = [*(("Ġ", letter) for letter in letters), ("x", "B")]
    core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return wrap(core, template, bos)


def metaspace(template: str | None = None, scheme: str = "first") -> PreTrainedTokenizerFast:
    """Llama's kind: `▁` for a space, put before the first word ("first") or before every segment ("always")."""
    pieces = ["<unk>", "▁", "\n", *map(chr, range(33, 127)), *(f"▁{letter}" for letter in LETTERS)]
    core = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", letter) for letter in LETTERS],
            unk_token="<unk>",
        )
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return wrap(core, template)


def word_level(template: str | None = None, words: str = "A B C D E F G H I J : .") -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel(vocab={w: i for i, w in enumerate(["<unk>", *words.split()])}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return wrap(core, template)


def tokens(tokenizer: PreTrainedTokenizerFast, n: int = 10) -> list[str]:
    return tokenizer.convert_ids_to_tokens(letter_ids(tokenizer, n))


@pytest.mark.parametrize(
    ("tokenizer", "before"),
    [
        (byte_level(), "Ġ"),
        (byte_level(bos=True), "Ġ"),
        (byte_level(CHATML), ""),
        (byte_level(NO_SYSTEM), ""),
        (byte_level(INST), "Ġ"),
        (byte_level(CHANNELS), ""),
        (byte_level(THINKS), ""),
        (metaspace(), "▁"),
        (metaspace(CHATML), ""),
        (metaspace(INST), "▁"),
        (metaspace(CHANNELS), ""),
        (metaspace(CHANNELS, scheme="always"), "▁"),
        (word_level(), ""),
        (word_level(CHATML), ""),
    ],
)
def test_letters_are_the_tokens_that_follow_the_prompt(tokenizer: PreTrainedTokenizerFast, before: str) -> None:
    assert tokens(tokenizer) == [f"{before}{letter}" for letter in LETTERS]
    assert tokens(tokenizer, 3) == [f"{before}{letter}" for letter in "ABC"]


@pytest.mark.parametrize("template", [CHATML, NO_SYSTEM, INST, CHANNELS])
@pytest.mark.parametrize("kind", [byte_level, metaspace, word_level])
def test_prompt_and_letter_begin_the_templates_own_answered_conversation(kind: Any, template: str) -> None:
    """The template renders the answered turn itself; today's date, where it writes one, is the only difference."""
    tokenizer = kind(template)
    (ids,) = encode(tokenizer, [QUESTION], 10_000)
    body = "Question: Which is wet?\nA. fire\nB. water\nC. sand"
    asked = (
        [{"role": "user", "content": f"{SYSTEM}\n\n{body}"}]
        if template == NO_SYSTEM
        else [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": body},
        ]
    )
    for letter, id in zip("ABC", letter_ids(tokenizer, 3), strict=True):
        answered = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": letter}], tokenize=False)
        answered = re.sub(r"^Date \S+", "Date 2025-01-01", answered)
        assert tokenizer(answered, add_special_tokens=False)["input_ids"][: len(ids) + 1] == [*ids, id]


def test_the_system_line_keeps_its_role_where_the_template_has_one() -> None:
    assert prompt(byte_level(CHATML), QUESTION) == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        "<|im_start|>user\nQuestion: Which is wet?\nA. fire\nB. water\nC. sand<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM])
def test_the_system_line_moves_into_the_user_turn_where_its_role_is_refused_or_dropped(template: str) -> None:
    assert prompt(byte_level(template), QUESTION) == (
        f"<|im_start|>user\n{SYSTEM}\n\nQuestion: Which is wet?\nA. fire\nB. water\nC. sand<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_without_a_template_the_prompt_is_plain() -> None:
    assert prompt(byte_level(), QUESTION) == (
        f"{SYSTEM}\n\nQuestion: Which is wet?\nA. fire\nB. water\nC. sand\nAnswer:"
    )


def test_the_prompt_goes_on_to_where_the_answer_starts() -> None:
    """A channel marker and an empty thought stand before the answer in the templates' own answered turns."""
    assert prompt(byte_level(CHANNELS), QUESTION).endswith("<|im_start|>assistant<|channel|>final<|message|>")
    assert prompt(byte_level(THINKS), QUESTION).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_template_that_writes_the_date_gives_the_same_prompt_every_day() -> None:
    text = prompt(byte_level(CHANNELS), QUESTION)
    assert text.startswith("Date 2025-01-01\n")
    assert datetime.now().strftime("%Y-%m-%d") not in text


def test_the_plain_prompt_has_the_tokenizers_bos_once_and_no_eos() -> None:
    tokenizer = byte_level(bos=True)
    (ids,) = encode(tokenizer, [QUESTION], 10_000)
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids[1:]) == prompt(tokenizer, QUESTION)
    (with_template,) = encode(byte_level(INST, bos=True), [QUESTION], 10_000)
    assert with_template.count(tokenizer.bos_token_id) == 1


def test_a_letter_of_two_tokens_is_named() -> None:
    tokenizer = byte_level(letters="ABDE")
    assert tokens(tokenizer, 2) == ["ĠA", "ĠB"]
    with pytest.raises(InputError, match=re.escape("the letter C is not one token of its own after the prompt")):
        letter_ids(tokenizer, 3)


def test_a_letter_that_melts_into_the_prompt_is_named() -> None:
    """The template ends in `x`, and the tokenizer knows `xB`: the prompt's last token would not be there any more."""
    with pytest.raises(InputError, match="the letter B is not one token of its own"):
        letter_ids(byte_level(CHATML.replace("assistant\n", "assistant\nx")), 4)


def test_a_letter_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(InputError, match="the letter D is not in the tokenizer's vocabulary"):
        letter_ids(word_level(words="A B C"), 4)


def test_letters_that_share_a_token_are_named() -> None:
    core = Tokenizer(models.WordLevel(vocab={"<unk>": 0, "letter": 1, ":": 2}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.normalizer = normalizers.Replace(Regex(r"\b[A-J]\b"), "letter")
    with pytest.raises(InputError, match="the letters A and B are the same token"):
        letter_ids(wrap(core, None), 2)


@pytest.mark.parametrize("n", [0, 1, 11])
def test_two_to_ten_letters(n: int) -> None:
    with pytest.raises(InputError, match="2 to 10 options"):
        letter_ids(byte_level(), n)


@pytest.mark.parametrize("template", [None, CHATML])
def test_the_longest_prompts_are_whole_or_an_error(data_root: Path, template: str | None) -> None:
    """Decoded, a prompt gives back its question and options to the last character; one token less room is refused."""
    tokenizer = byte_level(template)
    everything = load("mmlu_law", "test", data_root=data_root)
    longest = sorted(everything, key=lambda q: len(q.question) + sum(map(len, q.choices)))[-20:]
    encoded = encode(tokenizer, longest, 100_000)
    for question, ids in zip(longest, encoded, strict=True):
        text = tokenizer.decode(ids)
        assert text == prompt(tokenizer, question)
        assert question.question.strip() in text
        assert all(choice.strip() in text for choice in question.choices)
    room = max(map(len, encoded))
    assert encode(tokenizer, longest, room) == encoded
    culprit = longest[[len(ids) for ids in encoded].index(room)].id
    message = f"question '{culprit}' of mmlu_law is {room} tokens long, longer than the model's context of {room - 1}"
    with pytest.raises(InputError, match=re.escape(message)):
        encode(tokenizer, longest, room - 1)


def test_a_models_nominal_length_does_not_cut_the_prompt() -> None:
    tokenizer = byte_level()
    tokenizer.model_max_length = 8
    (ids,) = encode(tokenizer, [QUESTION], 10_000)
    assert tokenizer.decode(ids) == prompt(tokenizer, QUESTION)


@pytest.mark.parametrize(
    "template", [None, "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"]
)
def test_another_system_line_takes_the_place_of_ours(template: str | None) -> None:
    """Oracle: our own prompt with the line replaced as text; and back again."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    question = Question("q", "Which?", ("a", "b"), 0, "t", "test")
    ours = prompt(tokenizer, question)
    assert SYSTEM in ours
    ids = encode(tokenizer, [question], 500)
    ask_with(tokenizer, " You answer. ")
    assert prompt(tokenizer, question) == ours.replace(SYSTEM, "You answer.")
    assert encode(tokenizer, [question], 500) != ids  # not what was remembered
    ask_with(tokenizer, None)
    assert encode(tokenizer, [question], 500) == ids
    with pytest.raises(InputError, match="system prompt is empty"):
        ask_with(tokenizer, " ")
