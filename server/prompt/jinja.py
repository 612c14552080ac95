"""Conversations by the model's chat template: messages to token ids and images. Used by `server/prompt/build.py`; API
process.

Users' strings are interrupted before the template sees them where they could become special tokens
(`server/prompt/special.py`), and calls and tools are arranged as it takes them (`server/prompt/tool_form.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from model_runtime.weights.errors import CheckpointError
from server.errors import context_overflow
from server.images import PreparedImage
from server.prompt.continuation import mark_end, up_to
from server.prompt.images import ChatPrompt, ImageMarkup
from server.prompt.messages import Form, Message, all_texts, image_urls, plain_message, texts_of
from server.prompt.options import ChatOptions, checked_ids
from server.prompt.special import SpecialText, choose_breakers, escaped, protect_all
from server.prompt.template import ChatTemplate, RenderTooLong
from server.prompt.tokenizer import Tokenizer
from server.prompt.tool_form import arranged
from server.reasoning import is_open, marks_of
from server.tools import plain_json
from server.tools.formats import FORMATS, format_of

_TEMPLATE_CHARS = 65_536
"""Text that a template may add to the users'."""


class JinjaRenderer:
    """Writes with one template and one tokenizer. Immutable."""

    def __init__(self, source: str, tokenizer: Tokenizer, markup: ImageMarkup | None, *, tool_parser: str) -> None:
        """`source` is the template's text, `tool_parser` as in `PromptBuilder`. Raises CheckpointError when the
        template has a syntax error, or itself writes what stands for an image."""
        self._tokenizer, self._markup = tokenizer, markup
        self._special = SpecialText(tokenizer.special_literals)
        self._template = ChatTemplate(source, tokenizer.special_variables)
        if markup is not None and self._template.writes(markup.literal):
            raise CheckpointError(
                f"config.json says that {markup.literal} stands for an image, and the chat template writes that where "
                "there is none; one of the two is not this model's"
            )
        self._form = _form(self._template, markup, source)
        self.names, self.reserved = self._template.names, self._template.reserved
        self.reasoning = marks_of(source)
        known = format_of(source, shows_tools=self._template.tool_form.shows_tools)
        self.tool_format = known if tool_parser == "auto" else FORMATS[tool_parser]

    def prompt(
        self, messages: Sequence[Message], images: Sequence[PreparedImage], *, max_model_len: int, options: ChatOptions
    ) -> ChatPrompt:
        """The conversation as ids and images. Raises BadRequest."""
        assert self._markup is None or len(image_urls(messages)) == len(images), "an image for each URL"
        breakers = choose_breakers(
            all_texts(messages, options.variables, options.tools), 1 + options.continue_final_message
        )
        breaker, mark = breakers[0], breakers[-1]
        try:
            text = self._render(messages, breaker, mark, max_model_len, options)
        except RenderTooLong:
            raise context_overflow(max_model_len, max_model_len) from None
        encode = partial(
            self._tokenizer.encode_rendered, breaker=breaker, add_special_tokens=options.add_special_tokens
        )
        if self._markup is None or not images:
            ids = encode(text)[-(options.keep_last or 0) :]
            prompt = ChatPrompt(ids=checked_ids(ids, max_model_len, "messages"))
        else:
            prompt = self._markup.place(encode(self._markup.surround(text)), images, max_model_len, options.keep_last)
        started = "".join(texts_of(messages[-1])) if options.continue_final_message else ""
        return replace(prompt, is_reasoning=is_open(self.reasoning, text, started))

    def _render(
        self, messages: Sequence[Message], breaker: str, mark: str, max_model_len: int, options: ChatOptions
    ) -> str:
        """The template's text, in which the breaker interrupts what users' text could become."""
        protect = partial(self._special.protect, breaker=breaker)
        plain = [
            plain_message(message, f"messages[{index}]", protect=protect, form=self._form)
            for index, message in enumerate(messages)
        ]
        template = self._template
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
            max_chars=max_model_len * self._tokenizer.max_token_bytes + _TEMPLATE_CHARS,
        )
        text = text.replace(escaped(breaker), breaker)
        return up_to(text.replace(escaped(mark), mark), mark) if options.continue_final_message else text


def _form(template: ChatTemplate, markup: ImageMarkup | None, source: str) -> Form:
    literal = None if markup is None else markup.literal
    says_thinking = ".thinking" in source and "reasoning_content" not in source
    return Form(
        takes_parts=template.takes_parts,
        knows_developer=template.knows_developer,
        image_literal=literal,
        shows_images=literal is not None and template.shows_images(literal),
        images_first="image" not in source,
        reasoning_name="thinking" if says_thinking else "reasoning_content",
    )
