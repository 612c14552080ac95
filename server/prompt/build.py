"""From what a request says to what the engine needs: messages and prompts to ids, and checks against the vocabulary.

Step 2 of a request's path. Called by the routes in `server/api`; API process. Everything wrong is a BadRequest that
names the field. Long texts are worked on in a thread, so that the event loop stays free.
"""

import asyncio
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from scheduler.plan import ints
from server.errors import BadRequest, context_overflow
from server.images import PreparedImage
from server.prompt.continuation import mark_end, up_to
from server.prompt.images import ChatPrompt, ImageMarkup
from server.prompt.messages import Form, Message, image_urls, plain_message, texts_of
from server.prompt.options import MAX_TRUNCATED, ChatOptions
from server.prompt.special import SpecialText, choose_breakers, escaped, protect_all, strings_in
from server.prompt.template import ChatTemplate, RenderTooLong
from server.prompt.tokenizer import Tokenizer
from server.prompt.tool_form import arranged
from server.reasoning import is_open, marks_of
from server.tools import plain_json
from server.tools.formats import FORMATS, format_of
from vision.config import Preprocessor

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]

DEFAULT_OPTIONS = ChatOptions()

_TEMPLATE_CHARS = 65_536
"""Text that a template may add to the users'."""
_THREAD_CHARS = 16_384
"""Shorter prompts are built on the event loop: about 10 ms."""


class PromptBuilder:
    """The model's tokenizer and chat template, applied to requests. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, preprocessor: Preprocessor | None = None, *, tool_parser: str = "auto"
    ) -> None:
        """Without a preprocessor the model takes no images. `tool_parser` is a name in FORMATS, or "auto" for what the
        chat template stands for. Raises CheckpointError when the template has a syntax error."""
        self.tokenizer = tokenizer
        self._special = SpecialText(tokenizer.special_literals)
        self._markup = None if preprocessor is None else ImageMarkup(preprocessor, tokenizer)
        source = tokenizer.chat_template
        if source is None:
            logger.warning(
                "the model has no chat template, so chat completions and images are refused; "
                "a folder takes one as chat_template.jinja"
            )
        self._template = None if source is None else ChatTemplate(source, tokenizer.special_variables)
        self._form = Form() if self._template is None else _form(self._template, self._markup, source or "")
        self.reasoning = None if source is None else marks_of(source)
        """The marks around the model's reasoning."""
        shows_tools = self._template is not None and self._template.tool_form.shows_tools
        known = format_of(source or "", shows_tools=shows_tools)
        self.tool_format = known if tool_parser == "auto" else FORMATS[tool_parser]
        """In which the model writes calls."""

    @property
    def variables(self) -> frozenset[str]:
        """The variables that the chat template knows."""
        return frozenset() if self._template is None else self._template.names

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
        image_url, in order. Special tokens and placeholders come from the template alone."""
        if self._template is None:
            raise BadRequest("This model has no chat template; use /v1/completions.", param="messages")
        if not messages:
            raise BadRequest("messages must not be empty.", param="messages")
        assert self._markup is None or len(image_urls(messages)) == len(images), "an image for each URL"
        for name in options.variables:
            if name in self._template.reserved:
                raise BadRequest(f"chat_template_kwargs cannot change {name}.", param="chat_template_kwargs")
        texts = [text for message in messages for text in texts_of(message)]
        texts += [*strings_in(options.variables), *strings_in(options.tools)]
        chars = sum(map(len, texts))
        self._check_chars(chars, max_model_len, "messages")
        build = partial(self._chat, self._template, messages, texts, images, max_model_len, options)
        return await asyncio.to_thread(build) if chars > _THREAD_CHARS or images else build()

    def _chat(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        texts: Sequence[str],
        images: Sequence[PreparedImage],
        max_model_len: int,
        options: ChatOptions,
    ) -> ChatPrompt:
        breakers = choose_breakers(texts, 1 + options.continue_final_message)
        breaker, mark = breakers[0], breakers[-1]
        try:
            text = self._render(template, messages, breaker, mark, max_model_len, options)
        except RenderTooLong:
            raise context_overflow(max_model_len, max_model_len) from None
        except RecursionError:
            raise BadRequest("The messages are nested too deeply.", param="messages") from None
        encode = partial(self.tokenizer.encode_rendered, breaker=breaker, add_special_tokens=options.add_special_tokens)
        if self._markup is None or not images:
            ids = encode(text)[-(options.keep_last or 0) :]
            prompt = ChatPrompt(ids=_checked(ids, max_model_len, "messages"))
        else:
            prompt = self._markup.place(encode(self._markup.surround(text)), images, max_model_len, options.keep_last)
        started = "".join(texts_of(messages[-1])) if options.continue_final_message else ""
        return replace(prompt, is_reasoning=is_open(self.reasoning, text, started))

    def _render(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        breaker: str,
        mark: str,
        max_model_len: int,
        options: ChatOptions,
    ) -> str:
        """The template's text, in which the breaker interrupts what users' text could become."""
        protect = partial(self._special.protect, breaker=breaker)
        plain = [
            plain_message(message, f"messages[{index}]", protect=protect, form=self._form)
            for index, message in enumerate(messages)
        ]
        tools = [protect_all(tool, protect) for tool in options.tools]
        wrap = self.tool_format.wrap or plain_json.wrap
        plain = arranged(plain, tools, template.tool_form, wrap=wrap, takes_parts=template.takes_parts)
        if options.continue_final_message:
            mark_end(plain[-1], mark)
        text = template.render(
            plain,
            {name: protect_all(value, protect) for name, value in options.variables.items()},
            tools=tools,
            add_generation_prompt=options.add_generation_prompt,
            max_chars=self._char_limit(max_model_len) + _TEMPLATE_CHARS,
        )
        text = text.replace(escaped(breaker), breaker)
        return up_to(text.replace(escaped(mark), mark), mark) if options.continue_final_message else text

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
        return _checked(ids[-(keep_last or 0) :], max_model_len, param, least_output)

    def _char_limit(self, max_model_len: int) -> int:
        return max_model_len * self.tokenizer.max_token_bytes

    def _check_chars(self, chars: int, max_model_len: int, param: str) -> None:
        """A text with more characters than the longest tokens hold bytes cannot fit; it is not even tokenized."""
        if chars > self._char_limit(max_model_len):
            raise context_overflow(-(-chars // self.tokenizer.max_token_bytes), max_model_len, param=param)


def _form(template: ChatTemplate, markup: ImageMarkup | None, source: str) -> Form:
    literal = None if markup is None else markup.literal
    says_thinking = ".thinking" in source and "reasoning_content" not in source
    return Form(
        takes_parts=template.takes_parts,
        knows_developer=template.knows_developer,
        image_literal=literal,
        shows_images=literal is not None and template.shows_images(literal),
        reasoning_name="thinking" if says_thinking else "reasoning_content",
    )


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


def _checked(ids: "array[int]", max_model_len: int, param: str, least_output: int = 1) -> "array[int]":
    if not ids:
        raise BadRequest(f"{param} must not be empty: it holds no token.", param=param)
    if len(ids) + least_output > max_model_len:
        raise context_overflow(len(ids), max_model_len, param=param)
    return ids
