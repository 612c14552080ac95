"""Structured output of a real server: the SDK's parse, streams, and what other servers fell over."""

import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.end_to_end.conftest import Server

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

CHAT = "/v1/chat/completions"
PATH: Any = [{"role": "user", "content": "Name a colour."}]
MANY_SCRIPTS = "访问搜索预报👩‍👩‍👧‍👦ďábelské🇨🇿"
RULES = "\n".join(f"a{index}: a{index + 1}" for index in range(6000))


class Point(BaseModel):
    """What an application asks for."""

    x: int
    colour: Literal["red", "green"]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", timeout=60) as made:
        yield made


def test_the_sdk_parses_its_own_types(client: OpenAI, server: Server) -> None:
    answer = client.chat.completions.parse(
        model=server.model, messages=PATH, response_format=Point, max_tokens=60, temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Point)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=server.model, messages=PATH, response_format=Point, max_tokens=2)


def test_the_sdk_parses_responses(client: OpenAI, server: Server) -> None:
    answer = client.responses.parse(model=server.model, input="A point.", text_format=Point, max_output_tokens=60)
    assert isinstance(answer.output_parsed, Point)


def test_streams_say_the_same(server: Server) -> None:
    body: dict[str, object] = {
        "messages": PATH,
        "structured_outputs": {"choice": [MANY_SCRIPTS, MANY_SCRIPTS + "!"]},
        "n": 2,
        "seed": 3,
        "max_tokens": 80,
    }
    whole = server.post(CHAT, **body)
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert all(text in (MANY_SCRIPTS, MANY_SCRIPTS + "!") for text in texts)
    streamed = {0: "", 1: ""}
    for chunk in server.stream(CHAT, **body):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert [streamed[0], streamed[1]] == texts


def test_logprobs_are_the_models_own_whatever_is_allowed(server: Server) -> None:
    body: dict[str, object] = {"messages": PATH, "max_tokens": 1, "logprobs": True, "top_logprobs": 3, "temperature": 0}
    free = server.post(CHAT, **body)["choices"][0]["logprobs"]["content"][0]
    forced = server.post(CHAT, **body, structured_outputs={"choice": ["~~"]})["choices"][0]["logprobs"]["content"][0]
    assert free["token"] != forced["token"]
    assert forced["top_logprobs"] == free["top_logprobs"]
    assert forced["logprob"] < free["logprob"]


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "[.*"},
        {"regex": "("},
        {"regex": "(?<=a)b"},
        {"regex": "(" * 5000 + "a" + ")*" * 5000},
        {"json": {"type": "hiccup"}},
        {"json": {"type": 123}},
        {"json": {"$ref": "#"}},
        {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        {"json": '{"items":' * 200 + "{}" + "}" * 200},
        {"json": {"type": "integer", "multipleOf": 1234567}},
        {"grammar": f'start: a0\n{RULES}\na6000: "x"'},
        {"grammar": "root ::= ("},
    ],
)
def test_bad_grammars_are_refused_in_time_and_harm_nobody(server: Server, form: dict[str, object]) -> None:
    good: dict[str, object] = {"messages": PATH, "structured_outputs": {"regex": "[a-c]{3}"}, "max_tokens": 9}
    assert len(server.post(CHAT, **good)["choices"][0]["message"]["content"]) == 3
    start = time.monotonic()
    answer = server.http.post(CHAT, json={"model": server.model, "messages": PATH, "structured_outputs": form})
    assert time.monotonic() - start < 4, "2 s on a machine that does nothing else"
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("structured_outputs")
    assert server.post(CHAT, messages=PATH, max_tokens=2)["choices"][0]["finish_reason"] == "length"


def test_numbers_and_white_space_end(server: Server) -> None:
    """The model would write this number for ever."""
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": "Write the number 1 followed by a million zeros."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "number"}}},
        "temperature": 0,
        "max_tokens": 150,
    }
    choice = server.post(CHAT, **body)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["message"]["content"]), int | float)


def test_a_dead_end_in_a_stream_is_an_error_event(server: Server) -> None:
    body = {"model": server.model, "messages": PATH, "stream": True, "structured_outputs": {"choice": ["ab"]}}
    body |= {"bad_words": ["b", "ab"]}
    with server.http.stream("POST", CHAT, json=body) as response:
        text = response.read().decode()
    assert "no token is left that the grammar allows" in text
    assert response.status_code == 400 or text.endswith("data: [DONE]\n\n")
    server.wait_for(server.is_idle, 5, "everything freed")
