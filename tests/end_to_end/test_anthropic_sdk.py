"""The official `anthropic` SDK with its defaults against a real server: what an application's code does."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests.end_to_end.conftest import Server

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}
PARIS = "The capital of France is Paris."


@pytest.fixture
def client(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none") as made:
        yield made


def test_message(client: Anthropic, server: Server) -> None:
    message = client.messages.create(model=server.model, max_tokens=50, messages=FRANCE, extra_body=GREEDY)
    (block,) = message.content
    assert block.type == "text"
    assert (block.text, message.stop_reason, message.stop_sequence) == (PARIS, "end_turn", None)
    assert (message.role, message.type, message.model) == ("assistant", "message", server.model)
    usage = message.usage
    cached = usage.cache_read_input_tokens or 0
    assert (usage.input_tokens + cached, usage.output_tokens) == (37, 8)
    assert message._request_id
    counted = client.messages.count_tokens(model=server.model, messages=FRANCE)
    assert counted.input_tokens == 37


def test_stream(client: Anthropic, server: Server) -> None:
    with client.messages.stream(model=server.model, max_tokens=50, messages=FRANCE, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == PARIS
    assert message.content[0].type == "text" and message.content[0].text == PARIS
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", 8)
    raw = client.messages.create(model=server.model, max_tokens=3, messages=FRANCE, extra_body=GREEDY, stream=True)
    kinds = [event.type for event in raw]
    assert (kinds[0], kinds[1], kinds[-3:]) == (
        "message_start",
        "content_block_start",
        ["content_block_stop", "message_delta", "message_stop"],
    )


def test_conversation_and_prefill(client: Anthropic, server: Server) -> None:
    talk: Any = [*FRANCE, {"role": "assistant", "content": PARIS}, {"role": "user", "content": "And of Italy?"}]
    begun = [*talk, {"role": "assistant", "content": "The capital of Italy is"}]
    whole = client.messages.create(
        model=server.model, max_tokens=20, messages=talk, system="Be short.", extra_body=GREEDY, stop_sequences=["Rome"]
    )
    rest = client.messages.create(
        model=server.model, max_tokens=20, messages=begun, system="Be short.", extra_body=GREEDY
    )
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "Rome")
    assert rest.content[0].type == "text" and rest.content[0].text.startswith(" Rome")


WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def test_tool_loop(client: Anthropic, server: Server) -> None:
    talk: Any = [{"role": "user", "content": "The weather in Paris?"}]
    asked: dict[str, Any] = {"model": server.model, "max_tokens": 60, "tools": [WEATHER], "extra_body": GREEDY}
    first = client.messages.create(messages=talk, tool_choice={"type": "any"}, **asked)
    assert first.stop_reason == "tool_use"
    (block, *_) = first.content
    assert block.type == "tool_use" and list(block.input) == ["city"]
    results = [{"type": "tool_result", "tool_use_id": item.id, "content": "Sunny."} for item in first.content]
    talk += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = client.messages.create(messages=talk, tool_choice={"type": "none"}, **asked)
    assert second.content[0].type == "text" and second.content[0].text
    named: Any = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(messages=talk[:1], tool_choice=named, **asked) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert final.content[0].type == "tool_use" and list(final.content[0].input) == ["city"]


def test_errors(client: Anthropic, server: Server) -> None:
    with pytest.raises(anthropic.NotFoundError) as lost:
        client.messages.create(model="no-such-model", max_tokens=5, messages=FRANCE)
    assert lost.value.request_id and "no-such-model" in lost.value.message
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match="does not accept images"):
        client.messages.create(model=server.model, max_tokens=5, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        client.messages.create(model=server.model, max_tokens=5, messages=[{"role": "user", "content": "x y " * 9000}])
