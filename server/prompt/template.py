"""Chat templates: jinja2 in its sandbox, rendering as Hugging Face transformers does (`apply_chat_template`).

Used by `server/prompt/build.py`; API process. A template comes from the model or the operator, never from a request:
the sandbox does not stop an expression such as `'x' * 10**9`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model_runtime.weights.errors import CheckpointError
from server.errors import BadRequest
from server.prompt.tool_form import probe

_MAX_MESSAGE_CHARS = 300
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_PROBE = "probe"
_OWN = ("messages", "tools", "documents", "add_generation_prompt")


class RenderTooLong(Exception):
    """A template produced more text than any prompt can hold."""


class _Refusal(jinja2.TemplateError):
    """`raise_exception` in a template: the messages break a rule of the model."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        """The statements inside."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A compiled template with the model's special tokens as variables."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Raises CheckpointError when the template has a syntax error."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template has an error in line {error.lineno}: {error.message}") from None
        self._variables = dict(variables)
        self.reserved = frozenset({*_OWN, *variables, *environment.globals})
        """Names that no request may give another meaning."""
        self.knows_developer = "developer" in source
        """Whether the role `developer` means something to the template."""
        self.takes_parts = not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])
        """Whether a message's content must be a list of parts; else it is a string."""
        self.tool_form = probe(self._attempt, source, takes_parts=self.takes_parts)
        """How it takes tools and calls."""
        self.names = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        """The variables that it knows."""

    def render(
        self,
        messages: list[dict[str, object]],
        variables: Mapping[str, object],
        *,
        tools: Sequence[object] = (),
        add_generation_prompt: bool,
        max_chars: int,
    ) -> str:
        """The prompt's text; `variables` are the request's, none of them reserved. Raises BadRequest when the template
        refuses the messages or fails on them, RenderTooLong above `max_chars` characters."""
        try:
            return self._render(messages, variables, tools or None, add_generation_prompt, max_chars)
        except _Refusal as error:
            raise BadRequest(str(error.message)[:_MAX_MESSAGE_CHARS], param="messages") from None
        except _RENDER_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]
            raise BadRequest(
                f"The model's chat template fails on these messages ({reason}).", param="messages"
            ) from None

    def _render(
        self,
        messages: list[dict[str, object]],
        variables: Mapping[str, object],
        tools: Sequence[object] | None,
        add_generation_prompt: bool,
        max_chars: int,
    ) -> str:
        context = {**variables, **self._variables} | {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces, chars = [], 0
        for piece in self._template.generate(context):
            chars += len(piece)
            if chars > max_chars:
                raise RenderTooLong
            pieces.append(piece)
        return "".join(pieces)

    def _shows(self, content: object) -> bool:
        """Whether the content of a user's message appears in the prompt."""
        return self._count(content, _PROBE) > 0

    def shows_images(self, literal: str) -> bool:
        """Whether parts of a user's message become what they are in the prompt: `literal` for one of type `image`, and
        the text of the others, which some templates look for under another key."""
        text = {"type": "text", "text": _PROBE}
        both: list[dict[str, str]] = [{"type": "image"}, text]
        return self._shows(both) and self._count(both, literal) == self._count([text], literal) + 1

    def writes(self, literal: str) -> bool:
        """Whether `literal` stands in a prompt though no message holds it."""
        turns = [{"role": role, "content": self._content(_PROBE)} for role in ("user", "assistant", "user")]
        return any(literal in self._attempt(turns[:count]) for count in (1, 3))

    def _content(self, text: str) -> object:
        return [{"type": "text", "text": text}] if self.takes_parts else text

    def _count(self, content: object, text: str) -> int:
        """How often the text stands in the prompt of a user's message; 0 where the template fails on it."""
        return self._attempt([{"role": "user", "content": content}]).count(text)

    def _attempt(self, messages: list[dict[str, object]], tools: Sequence[object] | None = None) -> str:
        """The prompt; "" where the template fails."""
        try:
            return self._render(messages, {}, tools, True, 1_000_000)
        except (*_RENDER_ERRORS, RenderTooLong):
            return ""


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML; chat templates expect plain JSON."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
