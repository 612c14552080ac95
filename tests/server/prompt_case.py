"""Prompts of short conversations, built without a server."""

import asyncio
from array import array

import pytest

from server.prompt.build import PromptBuilder
from server.prompt.images import ChatPrompt

LENGTH = 4096
Message = dict[str, object]


def chat(builder: PromptBuilder, messages: list[Message], length: int = LENGTH) -> "array[int]":
    return asyncio.run(builder.chat(messages, max_model_len=length)).ids


def quick_chat(builder: PromptBuilder, messages: list[Message]) -> "array[int]":
    """Short prompts are built without a pause, so no event loop is needed."""
    with pytest.raises(StopIteration) as done:
        builder.chat(messages, max_model_len=LENGTH).send(None)
    prompt: ChatPrompt = done.value.value
    return prompt.ids


def user(content: object) -> Message:
    return {"role": "user", "content": content}


def call(name: str, arguments: str, call_id: str = "1") -> Message:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }
