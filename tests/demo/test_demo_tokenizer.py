"""Any text survives the tokenizer, and every word of the world is one token."""

import pytest
from demo_model.build import Recipe, Text
from demo_model.tokenizer import build_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from vmoer import tasks
from vmoer.demo import STAGES, model_path
from vmoer.demo.words import WORDS
from vmoer.demo.world import SIZES, world
from vmoer.tasks import LETTERS, Question
from vmoer.tasks.prompt import encode, letter_ids, prompt

TOKENIZER = build_tokenizer()
MIRA = Question("mira-voss-scares", "scares Mira Voss", ("heron", "toad", "lynx", "vole"), 0, "demo", "test")


@settings(deadline=None, derandomize=True)
@given(st.text())
def test_any_text_survives(text):
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


@pytest.mark.parametrize("word", [*LETTERS, *WORDS])
def test_a_word_is_one_token(word):
    assert len(TOKENIZER(f" {word}")["input_ids"]) == 1


def test_letters_are_single_tokens_with_and_without_a_space():
    assert all(len(TOKENIZER(letter)["input_ids"]) == 1 for letter in LETTERS)
    assert len(set(letter_ids(TOKENIZER, len(LETTERS)))) == len(LETTERS)


def test_the_prompt_has_options_first_and_no_instructions():
    assert prompt(TOKENIZER, MIRA) == " A heron B toad C lynx D vole scares Mira Voss<|answer|>"


def test_a_question_without_options_is_left_alone():
    messages = [{"role": "user", "content": "scares Mira Voss"}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == " scares Mira Voss<|answer|>"


def test_options_may_hold_anything():
    odd = Question("odd", "Why. Really?", ("e. g. this", "that"), 0, "demo", "test")
    assert prompt(TOKENIZER, odd) == " A e. g. this B that Why. Really?<|answer|>"


@pytest.mark.parametrize("task", ["demo", "demo-near", "demo-far"])
def test_all_prompts_are_equally_long(task):
    splits = SIZES if task == "demo" else ("test",)
    questions = [question for split in splits for question in tasks.load(task, split)]
    assert {len(ids) for ids in encode(TOKENIZER, questions, 2048)} == {12}


def test_pretraining_asks_in_the_form_of_the_prompts():
    """The build writes token ids directly; the prompt builder, given the same question, writes the same ones."""
    inputs, targets = Text(world(), TOKENIZER, Recipe(address=0.0)).questions(drills=8)
    for ids, (_, letter, end) in zip(inputs.tolist(), targets.tolist(), strict=True):
        words = TOKENIZER.decode(ids[:11]).split()
        question = Question("q", " ".join(words[8:]), tuple(words[1:8:2]), 0, "demo", "train")
        assert ids == [*encode(TOKENIZER, [question], 2048)[0], letter]
        assert end == TOKENIZER.eos_token_id


def test_pretraining_never_tells_what_is_never_covered():
    text = Text(world(), TOKENIZER, Recipe())
    told = {fact.text for fact in (*world().people, *world().ships) if fact.coverage != "never"}
    for _ in range(20):
        statements, _ = text.statements()
        questions, _ = text.questions(drills=0)
        seen = {TOKENIZER.decode(row).strip() for row in (*statements[:, :3].tolist(), *questions[:, 8:11].tolist())}
        assert seen <= told


@pytest.mark.parametrize("stage", STAGES)
def test_the_stored_tokenizer_is_the_built_one(stage):
    stored = AutoTokenizer.from_pretrained(model_path(stage))
    assert stored.get_vocab() == TOKENIZER.get_vocab()
    assert stored.chat_template == TOKENIZER.chat_template
    assert encode(stored, [MIRA], 2048) == encode(TOKENIZER, [MIRA], 2048)
    assert (stored.eos_token, stored.pad_token) == (TOKENIZER.eos_token, TOKENIZER.pad_token)
