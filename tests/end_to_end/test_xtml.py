"""Kimi K3 (tiny, with the publisher's kind of tokenizer file) through a whole server: conversations by its own form."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.end_to_end.conftest import Server, run_server
from tests.model_runtime.kimi_k3 import write_checkpoint
from tests.server.test_prompt_xtml import ANSWER, CALLS, HI, SPECIAL, ids, result, user
from tests.server.test_tokenizer_tiktoken import CONFIG, MARKS, RANKS, write_folder

pytestmark = pytest.mark.timeout(120)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer"}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("k3")
    write_checkpoint(folder, vocab=len(RANKS) + 256, length=1024, eos=SPECIAL[MARKS[-1]])
    with run_server("--max-num-seqs", "4", model=str(write_folder(folder, CONFIG))) as running:
        yield running


def test_the_prompt(server: Server) -> None:
    assert server.post("/tokenize", messages=[user("Hi")])["tokens"] == ids(HI + ANSWER)
    hostile = server.post("/tokenize", messages=[user("".join(MARKS))])["tokens"]
    assert [token for token in hostile if token >= len(RANKS)] == [
        token for token in ids(HI + ANSWER) if token >= len(RANKS)
    ]


def test_an_answer(server: Server) -> None:
    """Of random weights, all of it is thought, unless it may not think."""
    fields: dict[str, Any] = {"messages": [user("Hi"), CALLS, *map(result, (1, 2, 3), "abc")], "max_tokens": 20}
    fields |= {"seed": 1, "logit_bias": {str(SPECIAL[mark]): -100 for mark in MARKS}}
    thought = server.post("/v1/chat/completions", **fields)
    message = thought["choices"][0]["message"]
    assert message["reasoning_content"] and not message["content"]
    assert thought["usage"]["completion_tokens_details"]["reasoning_tokens"] == 20
    message = server.post("/v1/chat/completions", **fields, reasoning_effort="none")["choices"][0]["message"]
    assert message["content"] and not message.get("reasoning_content")
    refused = server.http.post(
        "/v1/chat/completions", json=fields | {"model": server.model, "chat_template_kwargs": {"thinking": 1}}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize("effort", ["none", "low"])
def test_forced_calls_and_forms(server: Server, effort: str) -> None:
    fields: dict[str, Any] = {"messages": [user("Hi")], "reasoning_effort": effort, "seed": 3}
    end_of_thought = {} if effort == "none" else {str(SPECIAL["<|close|>"]): 100}
    called = server.post(
        "/v1/chat/completions",
        **fields,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        logit_bias=end_of_thought,
    )["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    (call,) = called["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    assert not called["message"]["content"]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    said = server.post(
        "/v1/chat/completions", **fields, response_format=form, max_tokens=200, logit_bias=end_of_thought
    )["choices"][0]
    assert said["finish_reason"] == "stop"
    jsonschema.validate(json.loads(said["message"]["content"]), SCHEMA)
