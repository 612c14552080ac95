"""The official `openai` SDK's Responses API against a real server: what an application's code does."""

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.end_to_end.conftest import Server

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none") as made:
        yield made


def test_response(client: OpenAI, server: Server) -> None:
    response = client.responses.create(model=server.model, input=FRANCE, temperature=0)
    assert (response.output_text, response.status, response.model) == (PARIS, "completed", server.model)
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (37, 8, 45)
    assert client.responses.retrieve(response.id).output_text == PARIS
    assert client.responses.input_tokens.count(model=server.model, input=FRANCE).input_tokens == 37
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_stream(client: OpenAI, server: Server) -> None:
    kinds, text = [], ""
    for event in client.responses.create(model=server.model, input=FRANCE, temperature=0, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == PARIS
    assert (kinds[:2], kinds[-1]) == (["response.created", "response.in_progress"], "response.completed")
    with client.responses.stream(model=server.model, input=FRANCE, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == PARIS


def test_conversation(client: OpenAI, server: Server) -> None:
    asked: dict[str, Any] = {"model": server.model, "temperature": 0}
    first = client.responses.create(input=FRANCE, **asked)
    second = client.responses.create(input="And of Italy?", previous_response_id=first.id, **asked)
    assert "Rome" in second.output_text
    by_hand = client.responses.create(
        input=[
            {"role": "user", "content": FRANCE},
            *(item.model_dump(exclude_none=True) for item in first.output),  # type: ignore[list-item]
            {"role": "user", "content": "And of Italy?"},
        ],
        **asked,
    )
    assert by_hand.output_text == second.output_text
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=1))
    texts = [part.text for item in listed for part in item.content]  # type: ignore[union-attr]
    assert texts == [FRANCE, PARIS, "And of Italy?"]


def test_background(client: OpenAI, server: Server) -> None:
    response = client.responses.create(model=server.model, input=FRANCE, temperature=0, background=True)
    assert response.status in ("queued", "in_progress")
    deadline = time.monotonic() + 30
    while response.status in ("queued", "in_progress") and time.monotonic() < deadline:
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    assert (response.status, response.output_text) == ("completed", PARIS)
    long = {"ignore_eos": True}
    running = client.responses.create(model=server.model, input=FRANCE, background=True, extra_body=long)
    assert client.responses.cancel(running.id).status == "cancelled"
    server.wait_for(server.is_idle, 10, "idleness")


def test_log_probabilities(client: OpenAI, server: Server) -> None:
    response = client.responses.create(
        model=server.model,
        input=FRANCE,
        temperature=0,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    (part,) = response.output[0].content  # type: ignore[union-attr]
    assert part.type == "output_text" and part.logprobs is not None
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == PARIS
    assert all(len(entry.top_logprobs) == 2 and -10 < entry.logprob <= 0 for entry in part.logprobs)


class Place(BaseModel):
    city: str


WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def test_parsed_output(client: OpenAI, server: Server) -> None:
    asked: dict[str, Any] = {"model": server.model, "input": "Where is the Louvre?", "temperature": 0}
    response = client.responses.parse(text_format=Place, **asked)
    assert isinstance(response.output_parsed, Place)
    with client.responses.stream(text_format=Place, **asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == response.output_parsed


def test_tool_loop(client: OpenAI, server: Server) -> None:
    asked: dict[str, Any] = {"model": server.model, "temperature": 0, "max_output_tokens": 60, "tools": [WEATHER]}
    first = client.responses.create(input="The weather in Paris?", tool_choice="required", **asked)
    (item, *_) = first.output
    assert item.type == "function_call"
    assert list(json.loads(item.arguments)) == ["city"]
    result: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "Sunny."}
    second = client.responses.create(input=[result], previous_response_id=first.id, tool_choice="none", **asked)
    assert second.output_text
    named: Any = {"type": "function", "name": "get_weather"}
    with client.responses.stream(input="The weather in Paris?", tool_choice=named, **asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (call,) = stream.get_final_response().output
    assert call.type == "function_call" and call.arguments == "".join(deltas)


def test_errors(client: OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as lost:
        client.responses.create(model=server.model, input="x", previous_response_id="resp_none")
    assert lost.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=server.model, input="x", tools=[{"type": "web_search"}])
    assert refused.value.param == "tools"
