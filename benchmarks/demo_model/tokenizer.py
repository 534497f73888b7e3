"""The demo's tokenizer: byte-level, so that any text can be encoded, with each word of the world one token.

It is a Unigram model over GPT-2's byte alphabet: 256 bytes, and the words (with the space in front) at a far better score
than their bytes. The chat template puts the options before the question and drops the instructions, which the model was
never taught to read:

    A heron B toad C lynx D vole scares Mira Voss<|answer|> C<|end|>

A question without options is left as it is, and its answer is the word itself.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vmoer.demo.words import WORDS
from vmoer.tasks import LETTERS

ANSWER, END, PAD = "<|answer|>", "<|end|>", "<|pad|>"
CONTEXT = 2048

CHAT_TEMPLATE = """
{%- for message in messages %}
{%- if message['role'] == 'user' %}
{%- set text = message['content'] %}
{%- if 'Question: ' in text %}
{%- set lines = text.split('Question: ', 1)[1].split('\\n') %}
{%- for line in lines[1:] %}{{ ' ' + line.replace('. ', ' ', 1) }}{% endfor %}
{{- ' ' + lines[0] }}
{%- else %}{{ ' ' + text }}{% endif %}
{%- elif message['role'] == 'assistant' %}
{{- '<|answer|> ' + message['content'] + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|answer|>' }}{% endif %}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, made from the word list alone."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{word}" for word in (*LETTERS, *WORDS)]
    tokenizer = Tokenizer(models.Unigram([(byte, -10.0) for byte in alphabet] + [(word, -1.0) for word in words]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, END, ANSWER])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[ANSWER],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE.strip(),
    )
