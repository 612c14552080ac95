"""Calls of a real model that has never learned to call anything: forced ones are valid, whatever it would like."""

import json
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from tests.end_to_end.conftest import Server

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
    },
    "pay": {
        "type": "object",
        "properties": {
            "to": {"$ref": "#/$defs/account"},
            "amounts": {"type": "array", "items": {"type": "integer", "maximum": 999}, "minItems": 1, "maxItems": 3},
        },
        "required": ["to", "amounts"],
        "$defs": {
            "account": {"type": "object", "properties": {"iban": {"type": "string", "pattern": "^[A-Z]{2}\\d{4}$"}}}
        },
    },
    "now": {"type": "object", "properties": {}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def checked(choice: Any, *, least: int = 1) -> list[tuple[str, str]]:
    """The calls of an answer: each valid, but for the last of one that was cut."""
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    whole = calls if choice.finish_reason != "length" else calls[:-1]
    assert len(calls) >= least
    for name, arguments in whole:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    return calls


@pytest.mark.parametrize("temperature", [0, 1])
def test_required(server: Server, client: OpenAI, temperature: float) -> None:
    fields: Any = {"tools": TOOLS, "tool_choice": "required", "temperature": temperature, "seed": 3, "max_tokens": 120}
    whole = client.chat.completions.create(model=server.model, messages=QUESTION, n=3, **fields)
    for choice in whole.choices:
        checked(choice)
        assert choice.message.content is None
        assert choice.finish_reason in ("tool_calls", "length")
    with client.chat.completions.stream(model=server.model, messages=QUESTION, **fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert checked(streamed) == checked(whole.choices[0])
    assert streamed.finish_reason == whole.choices[0].finish_reason


def test_one_named_function(server: Server, client: OpenAI) -> None:
    for name in SCHEMAS:
        choice: Any = {"type": "function", "function": {"name": name}}
        answer = client.chat.completions.create(
            model=server.model,
            messages=QUESTION,
            tools=TOOLS,
            tool_choice=choice,
            temperature=1,
            seed=5,
            max_tokens=200,
        ).choices[0]
        assert [called for called, _ in checked(answer)] == [name]
        assert answer.finish_reason == "stop"


def test_calls_or_an_answer_of_a_form(server: Server, client: OpenAI) -> None:
    schema: Any = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
    format: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    fields: Any = {"tools": TOOLS, "response_format": format, "parallel_tool_calls": False, "max_tokens": 60}
    for seed in range(3):
        answer = client.chat.completions.create(model=server.model, messages=QUESTION, seed=seed, **fields).choices[0]
        calls = checked(answer, least=0)
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.message.content or ""), schema)
        else:
            assert (answer.finish_reason, len(calls)) in (("tool_calls", 1), ("length", 0), ("length", 1))


def test_a_call_that_is_not_forced(server: Server, client: OpenAI) -> None:
    """A small model copies what it sees in the conversation: a call in the form of those before."""
    call: Any = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    }
    messages = [
        {"role": "user", "content": "What is the weather in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
        {"role": "assistant", "content": "It is sunny in Rome."},
        *QUESTION,
    ]
    answer = client.chat.completions.create(
        model=server.model, messages=messages, tools=TOOLS[:1], temperature=0, max_tokens=60
    ).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert [call.function.arguments for call in answer.message.tool_calls or ()] == ['{"city":"Paris"}']
