"""A request to Anthropic's Messages API as a chat request. Used by `server/messages/routes.py`; API process. Pure."""

from collections.abc import Mapping
from typing import Any

from server.errors import BadRequest
from server.messages.blocks import chat_messages
from server.schema.chat import ChatBody
from server.schema.common import validate
from server.schema.messages import CountTokensBody, MessagesBody, ToolChoice
from server.schema.unknown import check_unknown

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(body: CountTokensBody) -> tuple[ChatBody, list[str]]:
    """(the chat request, names of parameters that have no effect). Raises BadRequest."""
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
        "chat_template_kwargs": body.thinking and {"enable_thinking": body.thinking.type != "disabled"},
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
    chat = validate(ChatBody, document)
    ignored = check_unknown({**(chat.model_extra or {}), **chat.unhonoured}, strict=False)
    return chat, ignored + (["is_error"] if _tells_of_errors(body) else [])


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
