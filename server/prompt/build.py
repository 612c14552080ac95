"""From what a request says to what the engine needs: messages and prompts to ids, and checks against the vocabulary.

Step 2 of a request's path. Called by the routes in `server/api`; API process. Everything wrong is a BadRequest that
names the field. Long texts are worked on in a thread, so that the event loop stays free.
"""

import asyncio
import logging
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from scheduler.plan import ints
from server.errors import BadRequest, context_overflow
from server.images import PreparedImage
from server.prompt.images import ChatPrompt, ImageMarkup
from server.prompt.jinja import JinjaRenderer
from server.prompt.messages import Message, all_texts
from server.prompt.options import MAX_TRUNCATED, ChatOptions, checked_ids
from server.prompt.tokenizer import Tokenizer
from server.prompt.xtml import XtmlRenderer
from server.reasoning import ReasoningMarks
from server.tools.formats import FORMATS, ToolFormat
from vision.config import Preprocessor

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]

DEFAULT_OPTIONS = ChatOptions()

_THREAD_CHARS = 16_384
"""Shorter prompts are built on the event loop: about 10 ms."""
TEXT_CHARS = 256
"""What a text costs beside its own characters, such as an empty message, in characters."""
MAX_BAD_WORDS_CHARS = _THREAD_CHARS // 2
"""Together; each is encoded twice."""


class Renderer(Protocol):
    """Writes the conversations of one model."""

    names: frozenset[str]
    """The variables that it knows."""
    reserved: frozenset[str]
    """Names that no request may give another meaning."""
    reasoning: ReasoningMarks | None
    """The marks around the model's reasoning."""
    tool_format: ToolFormat
    """In which the model writes calls."""

    def prompt(
        self, messages: Sequence[Message], images: Sequence[PreparedImage], *, max_model_len: int, options: ChatOptions
    ) -> ChatPrompt:
        """The conversation as ids and images. Raises BadRequest."""
        ...


class PromptBuilder:
    """The model's tokenizer and form of conversations, applied to requests. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, preprocessor: Preprocessor | None = None, *, tool_parser: str = "auto"
    ) -> None:
        """Without a preprocessor the model takes no images. `tool_parser` is a name in FORMATS, or "auto" for what the
        form of conversations stands for. Raises CheckpointError for a template that cannot be used."""
        self.tokenizer = tokenizer
        markup = None if preprocessor is None else ImageMarkup(preprocessor, tokenizer)
        self._renderer = _renderer(tokenizer, markup, tool_parser)
        self.reasoning = None if self._renderer is None else self._renderer.reasoning
        """The marks around the model's reasoning."""
        known = FORMATS["json"] if self._renderer is None else self._renderer.tool_format
        self.tool_format = known if tool_parser == "auto" else FORMATS[tool_parser]
        """In which the model writes calls."""

    @property
    def variables(self) -> frozenset[str]:
        """The variables that conversations know."""
        return frozenset() if self._renderer is None else self._renderer.names

    async def chat(
        self,
        messages: Sequence[Message],
        images: Sequence[PreparedImage] = (),
        *,
        max_model_len: int,
        options: ChatOptions = DEFAULT_OPTIONS,
    ) -> ChatPrompt:
        """A conversation as ids and images. Keys of a message: role (one of ROLES), content (a string, None, or a list
        of parts), name, tool_calls, tool_call_id, reasoning_content. `images` are those of the messages' parts of type
        image_url, in order. Special tokens and placeholders come from the form of conversations alone."""
        if self._renderer is None:
            raise BadRequest("This model has no chat template; use /v1/completions.", param="messages")
        if not messages:
            raise BadRequest("messages must not be empty.", param="messages")
        for name in options.variables:
            if name in self._renderer.reserved:
                raise BadRequest(f"chat_template_kwargs cannot change {name}.", param="chat_template_kwargs")
        if len(messages) > max_model_len:  # each is a token at least
            raise context_overflow(len(messages), max_model_len)
        texts = all_texts(messages, options.variables, options.tools)
        chars = sum(map(len, texts))
        self._check_chars(chars, max_model_len, "messages")
        build = partial(_written, self._renderer, messages, images, max_model_len, options)
        is_long = chars + TEXT_CHARS * len(texts) > _THREAD_CHARS
        return await asyncio.to_thread(build) if is_long or images else build()

    async def completions(
        self,
        prompt: str | Sequence[int] | Sequence[Prompt],
        *,
        max_model_len: int,
        add_special_tokens: bool = True,
        keep_last: int | None = None,
        param: str = "prompt",
        least_output: int = 1,
    ) -> "list[array[int]]":
        """int32 ids of each prompt, which the request calls `param`, non-empty and leaving room for `least_output`
        tokens; the last `keep_last` of them. A raw prompt is the caller's own: literals of special tokens in it become
        special tokens, as this interface always did."""
        prompts = _as_list(prompt)
        if not prompts:
            raise BadRequest(f"{param} must not be empty.", param=param)
        one = partial(
            self._completion,
            max_model_len=max_model_len,
            add_special_tokens=add_special_tokens,
            keep_last=keep_last,
            param=param,
            least_output=least_output,
        )
        if sum(len(text) for text in prompts if isinstance(text, str)) <= _THREAD_CHARS:
            return [one(prompt) for prompt in prompts]
        return await asyncio.to_thread(lambda: [one(prompt) for prompt in prompts])

    def _completion(
        self,
        prompt: Prompt,
        max_model_len: int,
        add_special_tokens: bool,
        keep_last: int | None,
        param: str,
        least_output: int,
    ) -> "array[int]":
        if isinstance(prompt, str):
            self._check_chars(len(prompt), max_model_len, param)
            ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens, allow_special=True)
        else:
            if len(prompt) > max_model_len * (1 if keep_last is None else MAX_TRUNCATED):
                raise context_overflow(len(prompt), max_model_len, param=param)
            ids = ints(list(check_ids(self.tokenizer, prompt, param)))
        return checked_ids(ids[-(keep_last or 0) :], max_model_len, param, least_output)

    def _check_chars(self, chars: int, max_model_len: int, param: str) -> None:
        """A text with more characters than the longest tokens hold bytes cannot fit; it is not even tokenized."""
        if chars > max_model_len * self.tokenizer.max_token_bytes:
            raise context_overflow(-(-chars // self.tokenizer.max_token_bytes), max_model_len, param=param)


def _renderer(tokenizer: Tokenizer, markup: ImageMarkup | None, tool_parser: str) -> Renderer | None:
    source = tokenizer.chat_template
    if source is not None:
        return JinjaRenderer(source, tokenizer, markup, tool_parser=tool_parser)
    if tokenizer.writes_xtml:
        return XtmlRenderer(tokenizer)
    logger.warning(
        "the model has no chat template, so chat completions and images are refused; "
        "a folder takes one as chat_template.jinja"
    )
    return None


def _written(
    renderer: Renderer,
    messages: Sequence[Message],
    images: Sequence[PreparedImage],
    max_model_len: int,
    options: ChatOptions,
) -> ChatPrompt:
    try:
        return renderer.prompt(messages, images, max_model_len=max_model_len, options=options)
    except RecursionError:
        raise BadRequest("The messages are nested too deeply.", param="messages") from None


def output_budget(prompt_tokens: int, max_model_len: int, requested: int | None) -> int:
    """How many tokens may be generated: what is asked for, at most what is left of the context (None: all of it)."""
    left = max_model_len - prompt_tokens
    return left if requested is None else min(requested, left)


def check_ids(tokenizer: Tokenizer, ids: Sequence[int], param: str) -> Sequence[int]:
    """The ids. Raises BadRequest when one is not in the vocabulary."""
    for token_id in (min(ids), max(ids)) if ids else ():
        if not 0 <= token_id < tokenizer.vocab_size:
            raise BadRequest(
                f"{param} holds token id {str(token_id)[:40]}; ids are 0 to {tokenizer.vocab_size - 1}.", param=param
            )
    return ids


def logit_bias(tokenizer: Tokenizer, bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """(id, value) pairs from an object whose keys are ids in decimal, each written in one way only."""
    pairs = []
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
            raise BadRequest("logit_bias: each key must be a token id in decimal.", param="logit_bias")
        pairs.append((int(key), float(value)))
    check_ids(tokenizer, [token_id for token_id, _ in pairs], "logit_bias")
    return tuple(pairs)


def stop_token_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[int, ...]:
    """Each id once."""
    return tuple(dict.fromkeys(check_ids(tokenizer, ids, "stop_token_ids")))


def bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The id sequences of each word as it stands at the beginning of a text and after a space."""
    if sum(map(len, words)) > MAX_BAD_WORDS_CHARS:
        raise BadRequest(f"bad_words must not exceed {MAX_BAD_WORDS_CHARS} characters together.", param="bad_words")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise BadRequest("bad_words: each word must hold more than white space.", param="bad_words")
        for form in (word.lstrip(), " " + word.lstrip()):
            sequences[tuple(tokenizer.encode(form, add_special_tokens=False, allow_special=True))] = None
    return tuple(sequence for sequence in sequences if sequence)


def _as_list(prompt: str | Sequence[int] | Sequence[Prompt]) -> list[Prompt]:
    """Every form of `prompt` as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    numbers = [item for item in prompt if isinstance(item, int)]
    return [numbers] if numbers else [item for item in prompt if not isinstance(item, int)]
