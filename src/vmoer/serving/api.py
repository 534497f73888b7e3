"""In vLLM's API processes: `extra_body={"uncertainty": true}` gives `choices[i].uncertainty`; who does not ask sees no change.

`vllm serve --middleware vmoer.serving.api.Uncertainty` imports this module, which then wraps four places of vLLM's:

    RequestState      each output carries its request's rows, which vLLM shows only at the end
    AsyncLLM          the prompt's rows stay in the worker, unless they are asked for; letters of options are asked for
    chat, completion  what is asked is read from the request, and put into the response, whole or streamed
"""

import contextvars
import functools
import json
import os
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestState

from vmoer.errors import InputError
from vmoer.saved import calibrator
from vmoer.serving import metrics
from vmoer.serving.reading import Cursor, Reader, tell_lost
from vmoer.serving.rows import unpack
from vmoer.serving.values import Asked, Threshold, parse, tokens_of
from vmoer.tasks.prompt import letter_ids

SETTINGS = "VMOER_SERVING"
"""The environment variable by which `vmoer serve` tells this process the threshold and the calibrator."""
_settings = json.loads(os.environ.get(SETTINGS, "{}"))
THRESHOLD = Threshold(**_settings["threshold"]) if _settings.get("threshold") else None
CALIBRATOR = calibrator.checked(_settings["calibrator"], SETTINGS) if _settings.get("calibrator") else None
_wanted: contextvars.ContextVar[tuple[bool, list[int]]] = contextvars.ContextVar("vmoer_wanted", default=(False, []))
"""Of the request under way: whether the prompt's rows are asked for, and the tokens of its options' letters."""


def _asked(request: Any) -> Asked | None:
    return parse((request.model_extra or {}).get("uncertainty"))


_letter_ids = functools.lru_cache(letter_ids)


def _letters(serving: Any, asked: Asked | None) -> list[int]:
    """The tokens of the letters, where a question has options."""
    return _letter_ids(serving.renderer.tokenizer, asked.options) if asked and asked.options else []


def _reader(serving: Any, request: Any) -> Reader:
    asked = _asked(request)
    return Reader(asked, _letters(serving, asked), THRESHOLD, CALIBRATOR, metrics.judge)


# -- where rows come from ----------------------------------------------------------------------------------------------

_new_output, _generate = RequestState._new_completion_output, AsyncLLM.generate


@functools.wraps(_new_output)
def _output_with_rows(self: Any, *args: Any, **kwargs: Any) -> Any:
    """An output with the list of its request's rows, which grows, and how many of them lie before the first token's."""
    chunks, self.routed_experts_chunks = self.routed_experts_chunks, []  # vLLM would join them for nobody
    out = _new_output(self, *args, **kwargs)
    self.routed_experts_chunks = chunks
    out.vmoer_rows = None
    try:
        if not hasattr(self, "vmoer_lead"):
            self.vmoer_lead = sum(map(len, chunks)) - self.detokenizer.num_output_tokens()
        out.vmoer_rows = chunks, self.vmoer_lead
        if out.finish_reason is not None and chunks:
            cursor = Cursor(chunks)
            cursor.take(self.vmoer_lead)
            metrics.observe(tokens_of(unpack(cursor.take(self.detokenizer.num_output_tokens()))), THRESHOLD)
    except Exception:  # the answer goes out without it
        tell_lost()
    return out


@functools.wraps(_generate)
def _generate_with_rows(self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
    """Rows from the prompt's last token on, where the first new token is chosen; all of them where the prompt's are asked for."""
    tokens = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    whole, letters = _wanted.get()
    if tokens:
        sampling_params.routed_experts_prompt_start = 0 if whole else len(tokens) - 1
    if letters:
        sampling_params.logprob_token_ids = letters
    return _generate(self, prompt, sampling_params, *args, **kwargs)


# -- requests and responses --------------------------------------------------------------------------------------------

_chat_whole, _chat_stream = (
    OpenAIServingChat.chat_completion_full_generator,
    OpenAIServingChat.chat_completion_stream_generator,
)
_text_whole = OpenAIServingCompletion.request_output_to_completion_response
_text_stream = OpenAIServingCompletion.completion_stream_generator


def _checked(own: Callable[..., Any]) -> Callable[..., Any]:
    """A request that asks for what there is not is refused before it is begun."""

    @functools.wraps(own)
    async def create(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            asked = _asked(request)
            if asked and request.use_beam_search:
                raise InputError("uncertainty is not known for beam search")
            letters = _letters(self, asked)
            if letters and request.logprobs is not None and request.logprobs is not False:
                raise InputError("uncertainty: options and logprobs cannot be asked for at once")
            if letters and CALIBRATOR is not None:
                CALIBRATOR.check_options([len(letters)])
        except InputError as error:
            return self.create_error_response(str(error))
        token = _wanted.set((asked is not None and asked.prompt, letters))
        try:
            return await own(self, request, *args, **kwargs)
        finally:
            _wanted.reset(token)

    return create


@functools.wraps(_chat_whole)
async def _chat(self: Any, request: Any, results: AsyncIterator[Any], *args: Any, **kwargs: Any) -> Any:
    asked = _asked(request)
    last = None

    async def passing() -> AsyncIterator[Any]:
        nonlocal last
        async for last in results:
            yield last

    response = await _chat_whole(self, request, passing(), *args, **kwargs)
    if asked and last is not None and hasattr(response, "choices"):
        reader = _reader(self, request)
        for out in last.outputs:
            reader.read(out.index, out)
        for choice in response.choices:
            choice.uncertainty = reader.give(choice.index)
    return response


@functools.wraps(_chat_stream)
async def _chat_events(
    self: Any, request: Any, results: AsyncIterator[Any], *args: Any, **kwargs: Any
) -> AsyncIterator[str]:
    reader = _reader(self, request)

    async def passing() -> AsyncIterator[Any]:
        async for result in results:
            for out in result.outputs:
                reader.read(out.index, out)
            yield result

    async for line in _chat_stream(self, request, passing(), *args, **kwargs):
        yield reader.put(line)


@functools.wraps(_text_whole)
def _text(self: Any, batch: list[Any], request: Any, *args: Any, **kwargs: Any) -> Any:
    response = _text_whole(self, batch, request, *args, **kwargs)
    if _asked(request):
        reader = _reader(self, request)
        outputs = [out for result in batch for out in result.outputs]
        for choice, out in zip(response.choices, outputs, strict=True):
            reader.read(choice.index, out)
            choice.uncertainty = reader.give(choice.index)
    return response


@functools.wraps(_text_stream)
async def _text_events(
    self: Any, request: Any, inputs: Any, results: AsyncIterator[Any], *args: Any, **kwargs: Any
) -> AsyncIterator[str]:
    reader = _reader(self, request)

    async def passing() -> AsyncIterator[Any]:
        async for number, result in results:
            for out in result.outputs:
                reader.read(out.index + number * (request.n or 1), out)
            yield number, result

    async for line in _text_stream(self, request, inputs, passing(), *args, **kwargs):
        yield reader.put(line)


RequestState._new_completion_output, AsyncLLM.generate = _output_with_rows, _generate_with_rows
OpenAIServingChat.chat_completion_full_generator, OpenAIServingChat.chat_completion_stream_generator = (
    _chat,
    _chat_events,
)
OpenAIServingChat.create_chat_completion = _checked(OpenAIServingChat.create_chat_completion)
OpenAIServingCompletion.request_output_to_completion_response = _text
OpenAIServingCompletion.completion_stream_generator = _text_events
OpenAIServingCompletion.create_completion = _checked(OpenAIServingCompletion.create_completion)


class Uncertainty:
    """Serves the playground at `/vmoer`, and passes everything else on."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/vmoer" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        page = resources.files("vmoer.serving").joinpath("playground.html").read_bytes()
        headers = [(b"content-type", b"text/html; charset=utf-8"), (b"content-length", str(len(page)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": page})
