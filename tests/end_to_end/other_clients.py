"""Other people's clients, as their users have them, against a real server.

They are large, and leave sockets open, so they are no part of the test suite. With the extra `clients` installed:

    .venv/bin/python -m pytest -p no:unraisableexception tests/end_to_end/other_clients.py
"""

from typing import Any

import litellm
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

from tests.end_to_end.conftest import Server

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # theirs are their business
]

QUESTION = "What is the capital of France?"
PARIS = "The capital of France is Paris."
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_langchain_chat(server: Server) -> None:
    chat = ChatOpenAI(base_url=server.url + "/v1", api_key="none", model=server.model, temperature=0)
    answer = chat.invoke(QUESTION)
    assert answer.content == PARIS
    assert answer.usage_metadata["output_tokens"] == 8
    assert answer.response_metadata["finish_reason"] == "stop"
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == PARIS
    assert [answer.content for answer in chat.batch([QUESTION, QUESTION])] == [PARIS, PARIS]


def test_langchain_tools_and_forms(server: Server) -> None:
    chat = ChatOpenAI(base_url=server.url + "/v1", api_key="none", model=server.model, temperature=0, max_tokens=100)
    (call,) = chat.bind_tools([WEATHER], tool_choice="get_weather").invoke("The weather in Paris?").tool_calls
    assert call["name"] == "get_weather"
    assert list(call["args"]) == ["city"]
    city = {"type": "string", "maxLength": 20}
    schema = {"title": "Place", "type": "object", "properties": {"city": city}, "additionalProperties": False}
    schema["required"] = ["city"]
    place = chat.with_structured_output(schema, method="json_schema").invoke("Where is the Eiffel Tower?")
    assert list(place) == ["city"]


def test_langchain_responses(server: Server) -> None:
    chat = ChatOpenAI(
        base_url=server.url + "/v1", api_key="none", model=server.model, temperature=0, use_responses_api=True
    )
    assert chat.invoke(QUESTION).text == PARIS
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == PARIS


def test_langchain_anthropic(server: Server) -> None:
    chat = ChatAnthropic(base_url=server.url, api_key="none", model=server.model, temperature=0)
    answer = chat.invoke(QUESTION)
    assert answer.text == PARIS
    assert answer.usage_metadata["output_tokens"] == 8
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == PARIS


@pytest.mark.parametrize("surface", ["openai", "anthropic"])
def test_litellm(server: Server, surface: str) -> None:
    base = server.url + "/v1" if surface == "openai" else server.url
    asked: dict[str, Any] = {
        "model": f"{surface}/{server.model}",
        "messages": [{"role": "user", "content": QUESTION}],
        "api_base": base,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 50,
    }
    answer = litellm.completion(**asked)
    assert answer.choices[0].message.content == PARIS
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 8)
    chunks = list(litellm.completion(stream=True, **asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PARIS
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**(asked | {"model": f"{surface}/none"}))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**(asked | {"messages": [{"role": "user", "content": "x y " * 9000}]}))


def test_litellm_responses(server: Server) -> None:
    asked: dict[str, Any] = {"model": f"openai/{server.model}", "api_base": server.url + "/v1", "api_key": "none"}
    answer = litellm.responses(input=QUESTION, temperature=0, **asked)
    assert answer.output[0].content[0].text == PARIS
    kinds = [event.type for event in litellm.responses(input=QUESTION, temperature=0, stream=True, **asked)]
    assert kinds[-1].value == "response.completed"
