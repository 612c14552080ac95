"""A request to the Responses API as a chat request, and what its errors are about. Used by the routes; API process."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from server.errors import ApiError, BadRequest
from server.responses.input import Item, chat_messages
from server.schema.chat import ChatBody
from server.schema.common import SamplingFields, validate
from server.schema.responses import CountBody, ResponsesBody
from server.schema.unknown import check_unknown

_PARAMS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Chat parameter -> where the client has given it."""


@contextmanager
def errors_about(params: Mapping[str, str]) -> Iterator[None]:
    """Errors that name a chat parameter, or a field of it, name the client's instead."""
    try:
        yield
    except ApiError as error:
        named = error.param or ""
        error.param = params.get(named) or params.get(named.partition(".")[0], error.param)
        raise


def in_responses_words() -> AbstractContextManager[None]:
    """Around what is done with the chat request."""
    return errors_about(_PARAMS)


def to_chat(body: CountBody, items: Sequence[Item], *, first: int) -> tuple[ChatBody, list[str]]:
    """(the chat request, names of its parameters that have no effect) of a conversation of `items`, the first ones from
    earlier requests. Raises BadRequest."""
    messages = chat_messages(items, first=first)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    document: dict[str, Any] = {name: getattr(body, name) for name in SamplingFields.model_fields}
    document |= {
        "model": body.model,
        "messages": messages,
        "tools": body.tools and [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)],
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "reasoning_effort": body.reasoning and body.reasoning.effort,
    }
    if isinstance(body, ResponsesBody):
        document |= {
            "max_completion_tokens": body.max_output_tokens,
            "logprobs": body.wants_logprobs or None,
            "top_logprobs": body.top_logprobs,
        }
    chat = validate(ChatBody, document)
    return chat, check_unknown({**(chat.model_extra or {}), **chat.unhonoured}, strict=False)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, object]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:64]
        raise BadRequest(f"{where}: tools of type {kind!r} are not supported; only functions are.", param="tools")
    fields = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in fields if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: object) -> object:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        named = [{"type": "function", "function": tool} for tool in allowed] if isinstance(allowed, list) else allowed
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    kind = str(choice.get("type"))[:64]
    raise BadRequest(f"tool_choice of type {kind!r} is not supported.", param="tool_choice")


def _response_format(body: CountBody) -> object:
    given = body.text.format if body.text is not None else None
    if given is None or given.get("type") != "json_schema":
        return given
    fields = ("name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": {name: given[name] for name in fields if name in given}}
