"""A request to Anthropic's Messages API as a chat request. Used by `server/messages/routes.py`; API process. Pure."""

from collections.abc import Mapping
from typing import Any

from server.errors import BadRequest
from server.messages.blocks import chat_messages
from server.schema.messages import CountTokensBody, MessagesBody, ToolChoice
from server.schema.reasoning import SWITCHES

NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Chat parameter -> where the client has given it."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(body: CountTokensBody) -> dict[str, Any]:
    """The chat request's body, not yet checked. Raises BadRequest."""
    messages = chat_messages(body.messages, body.system)
    config = body.output_config
    document: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "tools": body.tools and [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)],
        "tool_choice": body.tool_choice and _tool_choice(body.tool_choice),
        "parallel_tool_calls": False if body.tool_choice and body.tool_choice.disable_parallel_tool_use else None,
        "reasoning_effort": config and config.effort,
        "response_format": config and config.format and _response_format(config.format),
        "thinking_token_budget": body.thinking and body.thinking.budget_tokens,
        "chat_template_kwargs": body.thinking and dict.fromkeys(SWITCHES, body.thinking.type != "disabled"),
        "continue_final_message": _begins_the_answer(messages[-1]) or None if messages else None,
    }
    if isinstance(body, MessagesBody):
        document |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
        document |= {"is_error": True} if _tells_of_errors(body) else {}
    return document


def _begins_the_answer(message: Mapping[str, Any]) -> bool:
    """A last message of the assistant's is how the answer is to begin, unless it calls tools."""
    return message["role"] == "assistant" and not message.get("tool_calls")


def _tells_of_errors(body: CountTokensBody) -> bool:
    """Chat templates know no results that are errors: only the text tells."""
    lists = [message.content for message in body.messages if isinstance(message.content, list)]
    return any(block.get("is_error") for blocks in lists for block in blocks)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, object]:
    if tool.get("type") not in (None, "custom"):
        kind = str(tool.get("type"))[:64]
        raise BadRequest(f"{where}: tools of type {kind!r} are not supported; only custom ones are.", param="tools")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def _tool_choice(choice: ToolChoice) -> object:
    if choice.type in _CHOICES:
        return _CHOICES[choice.type]
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(given: Mapping[str, Any]) -> object:
    if given.get("type") != "json_schema":
        raise BadRequest("output_config.format must be of type json_schema.", param="output_config")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.get("schema"), "strict": True}}
