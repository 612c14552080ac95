"""A request to the Responses API as a chat request. Used by `server/responses/routes.py`; API process. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from server.errors import BadRequest
from server.responses.input import Item, chat_messages
from server.schema.common import SamplingFields
from server.schema.responses import CountBody, ResponsesBody

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Chat parameter -> where the client has given it."""


def to_chat(body: CountBody, items: Sequence[Item], *, first: int) -> dict[str, Any]:
    """The chat request's body, not yet checked, of a conversation of `items`, the first ones from earlier requests.
    Raises BadRequest."""
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
    return document


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
