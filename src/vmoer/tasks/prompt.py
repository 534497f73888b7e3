"""One prompt for every model: it ends exactly where the answer letter would start.

The answer's probabilities are the softmax over the letters' logits at the last prompt token. So the letter's token at
that place matters: it is `A` after one chat template, ` A` after another and after the plain prompt. The tokenizer is
asked; nothing is assumed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from vmoer.errors import InputError
from vmoer.tasks._base import LETTERS, Question

SYSTEM = "Pick the best answer to the question. Reply with the capital letter in front of it and nothing else."

_ANSWER = "@@ANSWER@@"  # stands for the answer when we look at what a template puts around it
_PROBE = Question("probe", "Which of these is a colour?", ("red", "seven"), 0, "probe", "probe")


@dataclass(frozen=True)
class _Form:
    """The form of a tokenizer's prompts, the same for every question. It is found with a probe."""

    template: str | None  # None for the plain prompt
    system: str
    bos: tuple[int, ...] = ()  # the BOS token, where no template writes it
    system_role: bool = False
    opening: str = ""  # what belongs between the generation prompt and the answer, such as a channel marker
    space: str = " "  # what separates the prompt from the letter, and is part of the letter's token


_encoded: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[_Form, Question], list[int]]] = WeakKeyDictionary()
"""Encoded prompts by tokenizer: a study asks the same questions again and again."""


_systems: WeakKeyDictionary[PreTrainedTokenizerBase, str] = WeakKeyDictionary()
"""System lines in place of our own."""


def ask_with(tokenizer: PreTrainedTokenizerBase, system: str | None) -> None:
    """Write this tokenizer's prompts with another system line from now on; None for our own."""
    if system is None:
        _systems.pop(tokenizer, None)
    elif not system.strip():
        raise InputError("the system prompt is empty: leave it out")
    else:
        _systems[tokenizer] = system.strip()


def prompt(tokenizer: PreTrainedTokenizerBase, question: Question) -> str:
    """The prompt's text, by the tokenizer's own chat template where it has one.

    The system line goes into the user turn where the template refuses a system role or drops it.
    """
    return _text(tokenizer, _form(tokenizer), question)


def letter_ids(tokenizer: PreTrainedTokenizerBase, n: int) -> list[int]:
    """The token ids of the first n letters as they follow the prompt: one token each, all different."""
    if not 2 <= n <= len(LETTERS):
        raise InputError(f"{n} letter(s) asked for, where questions have 2 to {len(LETTERS)} options")
    form = _form(tokenizer)
    text = _text(tokenizer, form, _PROBE)
    before = _ids(tokenizer, form, text)
    found: dict[int, str] = {}
    for letter in LETTERS[:n]:
        after = _ids(tokenizer, form, text + form.space + letter)
        new = after[len(before) :]
        if after[: len(before)] != before or len(new) != 1:
            pieces = tokenizer.convert_ids_to_tokens(new)
            raise InputError(f"the letter {letter} is not one token of its own after the prompt: it becomes {pieces}")
        if new[0] == tokenizer.unk_token_id:
            raise InputError(f"the letter {letter} is not in the tokenizer's vocabulary")
        if new[0] in found:
            raise InputError(f"the letters {found[new[0]]} and {letter} are the same token ({new[0]})")
        found[new[0]] = letter
    return list(found)


def encode(
    tokenizer: PreTrainedTokenizerBase, questions: Iterable[Question], max_length: int, *, keep: bool = True
) -> list[list[int]]:
    """Each question's prompt as token ids. A prompt longer than `max_length`, the model's context, is an error.

    `keep` remembers them, for questions that are asked again.
    """
    form = _form(tokenizer)
    known = _encoded.setdefault(tokenizer, {})
    encoded = []
    for question in questions:
        ids = known.get((form, question))
        if ids is None:
            ids = _ids(tokenizer, form, _text(tokenizer, form, question))
            if keep:
                known[form, question] = ids
        if len(ids) > max_length:
            raise InputError(
                f"question {question.id!r} of {question.task} is {len(ids)} tokens long, "
                f"longer than the model's context of {max_length} (--skip-long leaves such questions out)"
            )
        encoded.append(ids)
    return encoded


def freely(tokenizer: PreTrainedTokenizerBase, question: str) -> str | list[dict[str, str]]:
    """A question without options as a prompt: through the chat template, or as a line where there is none."""
    if getattr(tokenizer, "chat_template", None):
        return [{"role": "user", "content": question}]
    return f"Question: {question}\nAnswer:"


def fitting(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], max_length: int
) -> tuple[list[Question], dict[str, int]]:
    """The questions whose prompts fit into the model's context, and how many of each task do not."""
    form, kept, long = _form(tokenizer), list[Question](), dict[str, int]()
    for question in questions:
        if len(_ids(tokenizer, form, _text(tokenizer, form, question))) <= max_length:
            kept.append(question)
        else:
            long[question.task] = long.get(question.task, 0) + 1
    return kept, long


def _body(question: Question) -> str:
    options = (f"{letter}. {choice.strip()}" for letter, choice in zip(LETTERS, question.choices, strict=False))
    return "\n".join((f"Question: {question.question.strip()}", *options))


def _text(tokenizer: PreTrainedTokenizerBase, form: _Form, question: Question) -> str:
    if form.template is None:
        return f"{form.system}\n\n{_body(question)}\nAnswer:"
    return _render(tokenizer, form.template, _messages(question, form.system, form.system_role)) + form.opening


def _messages(question: Question, system: str, system_role: bool) -> list[dict[str, str]]:
    if system_role:
        return [{"role": "system", "content": system}, {"role": "user", "content": _body(question)}]
    return [{"role": "user", "content": f"{system}\n\n{_body(question)}"}]


def _form(tokenizer: PreTrainedTokenizerBase) -> _Form:
    system = _systems.get(tokenizer, SYSTEM)
    if not tokenizer.chat_template:
        bos = tokenizer.bos_token_id
        adds_bos = bos is not None and tokenizer("A")["input_ids"][:1] == [bos]
        return _Form(template=None, system=system, bos=(bos,) if adds_bos else ())
    template = _undated(tokenizer.get_chat_template())
    system_role = _takes_system_role(tokenizer, template)
    messages = _messages(_PROBE, system, system_role)
    asked = _render(tokenizer, template, messages)
    answered = _render(tokenizer, template, [*messages, {"role": "assistant", "content": _ANSWER}], answered=True)
    gap = (
        ""  # stays empty where a template words an answered turn otherwise: the letter then follows the prompt directly
    )
    if answered.startswith(asked) and _ANSWER in answered:
        gap = answered[len(asked) : answered.index(_ANSWER)]
    opening = gap.removesuffix(" ")
    return _Form(template, system, system_role=system_role, opening=opening, space=gap[len(opening) :])


def _undated(template: str) -> str:
    """The template with a fixed date in place of today's, so that the same command gives the same prompt tomorrow."""
    if "strftime_now" not in template:
        return template
    return "{% macro strftime_now(form) %}2025-01-01{% endmacro +%}" + template


def _takes_system_role(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    from jinja2.exceptions import TemplateError

    try:
        return SYSTEM in _render(tokenizer, template, _messages(_PROBE, SYSTEM, system_role=True))
    except TemplateError:
        return False


def _render(
    tokenizer: PreTrainedTokenizerBase, template: str, messages: list[dict[str, str]], answered: bool = False
) -> str:
    """The template's text. Templates that let the model think before it answers are told not to; others ignore that."""
    text = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=not answered, enable_thinking=False
    )
    return str(text)


def _ids(tokenizer: PreTrainedTokenizerBase, form: _Form, text: str) -> list[int]:
    """A chat template writes its own special tokens. The plain prompt gets a BOS where the tokenizer puts one, and never
    an EOS, after which no letter would follow."""
    return [*form.bos, *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
