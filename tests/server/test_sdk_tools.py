"""Tools and reasoning with the official `openai` client, on a real socket: what an agent's code does."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from server.generation import GenerationRequest
from server.wire import Event
from tests.server.fakes import TOKENIZER, FakeEngine, says
from tests.server.test_sdk import serving

WEATHER = {"Paris": "12", "Rome": "21"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The temperature in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class GetWeather(pydantic.BaseModel):
    city: str


PARSED = openai.pydantic_function_tool(GetWeather, name="get_weather")
CALLS = "".join(
    f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}</tool_call>\n' for city in WEATHER
)


def agent(request: GenerationRequest, choice: int) -> list[Event | Exception]:
    """Asks for the weather of two cities at once, and answers when it has been told."""
    prompt = TOKENIZER.decode(request.prompt_ids, skip_special_tokens=False)
    told = [f"Result of get_weather:\n{degrees}" in prompt for degrees in WEATHER.values()]
    return says("It is warmer in Rome." if all(told) else "I look.\n" + CALLS)(request, choice)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(script=agent, max_model_len=4096)


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with (
        serving(engine, tool_call_parser="hermes") as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def _script(engine: FakeEngine) -> None:
    engine.script = agent


def question() -> list[Any]:
    return [{"role": "user", "content": "Where is it warmer, in Paris or in Rome?"}]


def results(message: Any) -> list[Any]:
    answers = []
    for call in message.tool_calls:
        city = json.loads(call.function.arguments)["city"]
        answers.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER[city]})
    return answers


def test_tool_loop(client: openai.OpenAI) -> None:
    messages = question()
    first = client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL]).choices[0]
    assert (first.finish_reason, first.message.content) == ("tool_calls", "I look.")
    assert [call.function.name for call in first.message.tool_calls] == ["get_weather"] * 2
    messages += [first.message, *results(first.message)]
    second = client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL]).choices[0]
    assert (second.finish_reason, second.message.content) == ("stop", "It is warmer in Rome.")
    assert second.message.tool_calls is None


def test_tool_loop_streamed(client: openai.OpenAI) -> None:
    messages = question()
    with client.chat.completions.stream(model="tiny", messages=messages, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        first = stream.get_final_completion().choices[0]
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert "content.delta" in kinds and "tool_calls.function.arguments.delta" in kinds
    assert (first.finish_reason, first.message.content) == ("tool_calls", "I look.")
    messages += [first.message.model_dump(exclude_none=True), *results(first.message)]
    with client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL], stream=True) as chunks:
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == "It is warmer in Rome."


def test_arguments_are_parsed_by_the_client(client: openai.OpenAI) -> None:
    answer = client.beta.chat.completions.parse(model="tiny", messages=question(), tools=[PARSED])
    calls = answer.choices[0].message.tool_calls
    assert [call.function.parsed_arguments for call in calls] == [GetWeather(city="Paris"), GetWeather(city="Rome")]


def test_a_truncated_call_is_no_call(client: openai.OpenAI, engine: FakeEngine) -> None:
    """The client itself refuses to parse what is marked as cut."""
    with pytest.raises(openai.LengthFinishReasonError):
        client.beta.chat.completions.parse(model="tiny", messages=question(), tools=[PARSED], max_tokens=70)


def test_allowed_tools(client: openai.OpenAI) -> None:
    allowed: Any = {"type": "function", "function": {"name": "get_weather"}}
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [allowed]}}
    answer = client.chat.completions.create(model="tiny", messages=question(), tools=[TOOL], tool_choice=choice)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_faults_of_tools_are_named(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(openai.BadRequestError, match="not in tools: other") as caught:
        client.chat.completions.create(model="tiny", messages=question(), tools=[TOOL], tool_choice=named)
    assert caught.value.param == "tool_choice"
