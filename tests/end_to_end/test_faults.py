"""Faults that people reported against other servers, by their number in that list, tried on the real model.

Those about aborts, overload and a small KV pool stand in `test_aborts.py`, `alone/test_overload.py` and
`test_small_pool.py`, about dying processes in `test_processes.py`, about seeds and neighbours (X08) in
`test_conversation.py`, about grammars in `test_structured.py`, about pictures in `test_images*.py`. Without a
model: stop strings and reasoning (H11) in `tests/server/test_reasoning.py`; tools in `test_tools.py` (H12, H19),
`test_whole_calls.py` (H17) and `test_tool_parsers.py` (X17) beside it; log-probabilities with speculation (H16) in
`tests/model_runtime/test_speculation.py`; redirects (X14) in `tests/vision/test_source_policy.py`; embeddings that
are not as many as planned (X21) in `tests/model_runtime/test_images.py`.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.end_to_end.conftest import Server, run_server, sse_events
from tests.end_to_end.test_conversation import ANSWER, CHAT, COMPLETIONS, QUESTION, finishes, texts

pytestmark = pytest.mark.model

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
MIXED = "访问搜索预报👩‍👩‍👧‍👦ďábelské🇨🇿"


def assert_alive(server: Server) -> None:
    answer = server.post(COMPLETIONS, prompt="The capital of France is", max_tokens=1, temperature=0)
    assert answer["choices"][0]["text"] == " Paris"


def copying(server: Server) -> dict[str, Any]:
    """A request whose answer is MIXED: the model is made to copy it."""
    ids = server.post("/tokenize", prompt=MIXED, add_special_tokens=False)["tokens"]
    bias = {str(token): 8 for token in ids}
    return {"prompt": f"{MIXED}\n" * 3, "max_tokens": len(ids), "temperature": 0, "logit_bias": bias}


def test_h01_an_error_in_mid_stream_is_told() -> None:
    """Here the deadline's; `test_processes.py` has that of a dying engine."""
    with run_server("--request-timeout", "3") as server:
        body = {"model": server.model, "prompt": "Once", "max_tokens": 8000, "ignore_eos": True}
        with server.http.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response:
            assert response.status_code == 200
            *chunks, error, last = sse_events(response.iter_lines())
        assert len(chunks) > 1
        assert finishes(chunks) == {0: []}
        assert (error["error"]["type"], last) == ("timeout_error", {"done": True})
        refused = server.http.post(COMPLETIONS, json=body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (408, "timeout_error")
        assert server.metrics()["request_success_total:timeout"] == 2
        server.wait_for(server.is_idle, 5, "idleness")


def test_h02_h03_one_finish_for_each_choice(server: Server) -> None:
    body = {"messages": QUESTION, "n": 3, "seed": 4, "max_tokens": 5, "ignore_eos": True}
    chunks = server.stream(CHAT, **body)
    assert finishes(chunks) == {0: ["length"], 1: ["length"], 2: ["length"]}
    whole = {choice["index"]: choice["message"]["content"] for choice in server.post(CHAT, **body)["choices"]}
    assert texts(chunks) == whole
    roles = [choice["index"] for chunk in chunks for choice in chunk["choices"] if "role" in choice["delta"]]
    assert sorted(roles) == [0, 1, 2]


def test_h04_overflow_of_a_stream_is_a_plain_400(server: Server) -> None:
    body = {"model": server.model, "prompt": [7] * 9000, "stream": True}
    refused = server.http.post(COMPLETIONS, json=body)
    assert (refused.status_code, refused.headers["content-type"]) == (400, "application/json")
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def chosen(server: Server) -> dict[str, Any]:
    """A request whose answer can only be MIXED, whatever is sampled."""
    return {"prompt": "Once", "max_tokens": 200, "structured_outputs": {"choice": [MIXED]}}


@pytest.mark.parametrize("forced", [copying, chosen])
def test_h06_mixed_scripts_arrive_whole(server: Server, forced: Callable[[Server], dict[str, Any]]) -> None:
    body = forced(server)
    whole = server.post(COMPLETIONS, n=2, **body)
    assert [choice["text"] for choice in whole["choices"]] == [MIXED, MIXED]
    assert texts(server.stream(COMPLETIONS, n=2, **body), "text") == {0: MIXED, 1: MIXED}


@pytest.mark.parametrize("forced", [copying, chosen])
def test_h07_mixed_scripts_in_a_batch(server: Server, forced: Callable[[Server], dict[str, Any]]) -> None:
    body = forced(server)
    with ThreadPoolExecutor(8) as pool:
        streams = list(pool.map(lambda _: server.stream(COMPLETIONS, **body), range(8)))
    assert [texts(chunks, "text") for chunks in streams] == [{0: MIXED}] * 8


@pytest.mark.parametrize("max_tokens", [4, 13, 14, 15, 16])
def test_h07_no_half_characters_where_the_limit_cuts(server: Server, max_tokens: int) -> None:
    body = copying(server) | {"max_tokens": max_tokens}
    (choice,) = server.post(COMPLETIONS, **body)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["text"] and MIXED.startswith(choice["text"])
    assert texts(server.stream(COMPLETIONS, **body), "text") == {0: choice["text"]}


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ([" of France"], "The capital"),
        (["l of Fr"], "The capita"),
        (["nowhere", "ital o", "s P"], "The cap"),
        (["France is Paris!", "s Par"], "The capital of France i"),
        (["Paris. "], ANSWER),
    ],
)
def test_h10_stop_strings_across_tokens(server: Server, stop: list[str], text: str) -> None:
    body = {"messages": QUESTION, "temperature": 0, "stop": stop}
    chunks = server.stream(CHAT, **body)
    assert texts(chunks) == {0: text}
    assert finishes(chunks) == {0: ["stop"]}
    (choice,) = server.post(CHAT, **body)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    included = server.post(CHAT, include_stop_str_in_output=True, **body)["choices"][0]
    assert included["message"]["content"] == text + (choice["stop_reason"] or "")


def test_h14_echo_with_logprobs(server: Server) -> None:
    body = {"prompt": "The capital of France is", "echo": True, "temperature": 0}
    (choice,) = server.post(COMPLETIONS, logprobs=1, top_k=1, max_tokens=1, **body)["choices"]
    assert choice["text"] == "The capital of France is Paris"
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(-9999 <= value < 0 for value in logprobs["token_logprobs"][1:])
    (nothing,) = server.post(COMPLETIONS, max_tokens=0, logprobs=1, **body)["choices"]
    assert nothing["text"] == body["prompt"]
    assert nothing["logprobs"]["token_logprobs"][:1] == [None]
    assert nothing["logprobs"]["token_logprobs"][1:] == pytest.approx(logprobs["token_logprobs"][1:-1], abs=1e-5)
    (bare,) = server.post(COMPLETIONS, max_tokens=0, **body)["choices"]
    assert (bare["text"], bare["finish_reason"]) == (body["prompt"], "length")
    assert_alive(server)


def test_logprobs_of_a_stream_spell_its_text(server: Server) -> None:
    body = {"messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = server.post(CHAT, **body)["choices"][0]["logprobs"]["content"]
    chunks = server.stream(CHAT, **body)
    logprobs = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    streamed = [entry for part in logprobs for entry in part["content"]]
    assert bytes(byte for entry in streamed for byte in entry["bytes"]).decode() == ANSWER
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]
    values = [entry["logprob"] for entry in whole]
    assert [entry["logprob"] for entry in streamed] == pytest.approx(values, abs=1e-5)
    assert len(set(values)) > 1
    for entry in whole:
        first, second = entry["top_logprobs"]
        assert entry["logprob"] == first["logprob"] >= second["logprob"]


def test_h25_constraints_that_are_not_honoured_are_not_ignored(server: Server) -> None:
    body = {"model": server.model, "messages": QUESTION, "max_tokens": 1}
    refused = {
        "guided_json": ({"type": "object"}, "guided_json"),
        "response_format": ({"type": "sound"}, "response_format.type"),
    }
    for name, (constraint, param) in refused.items():
        answer = server.http.post(CHAT, json=body | {name: constraint})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_h32_special_tokens_typed_by_users_are_text(server: Server) -> None:
    def usage(content: str) -> int:
        messages = [{"role": "user", "content": content}]
        return int(server.post(CHAT, messages=messages, max_tokens=1)["usage"]["prompt_tokens"])

    assert usage("a<|im_end|>b<|im_start|>c<image>d<|image_pad|>") > usage("abcd") + 8


def test_x09_choices_of_a_seed_differ_and_repeat(server: Server) -> None:
    body = {"messages": QUESTION, "n": 4, "seed": 99, "temperature": 1.5, "max_tokens": 10, "ignore_eos": True}
    first, second = (
        [choice["message"]["content"] for choice in server.post(CHAT, **body)["choices"]] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 4


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, {"prompt": ""}, 400),
        (COMPLETIONS, {"prompt": []}, 400),
        (COMPLETIONS, {"prompt": [[]]}, 400),
        (COMPLETIONS, {"prompt": [""]}, 400),
        (CHAT, {"messages": []}, 400),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}, 200),
        (CHAT, {"messages": [{"role": "user", "content": []}]}, 200),
        (RESPONSES, {"input": ""}, 400),
        (RESPONSES, {"input": []}, 400),
        (RESPONSES, {"input": [{"role": "user", "content": ""}]}, 200),
        (MESSAGES, {"messages": []}, 400),
        (MESSAGES, {"messages": [{"role": "user", "content": ""}]}, 200),
        (MESSAGES, {"messages": [{"role": "user", "content": []}]}, 400),
    ],
)
def test_x11_empty_prompts(server: Server, path: str, body: dict[str, Any], status: int) -> None:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    answer = server.http.post(path, json={"model": server.model, limit: 2, **body})
    assert answer.status_code == status
    if status == 400 and path != MESSAGES:
        assert answer.json()["error"]["param"].split("[")[0] in body
    assert_alive(server)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_x12_max_tokens_is_no_reservation(server: Server, name: str) -> None:
    (choice,) = server.post(CHAT, messages=QUESTION, temperature=0, **{name: 65_535})["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWER, "stop")


def test_x12_overflow_names_both_numbers(server: Server) -> None:
    limit = server.http.get("/v1/models").json()["data"][0]["max_model_len"]
    refused = server.http.post(COMPLETIONS, json={"model": server.model, "prompt": [7] * limit, "max_tokens": 1})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert f"maximum context length is {limit} tokens" in error["message"]
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (limit, limit)
    assert str(error["n_prompt_tokens"]) in error["message"]


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": QUESTION}), (COMPLETIONS, {"prompt": "Once"})])
def test_x18_empty_choices_only_when_usage_is_asked_for(server: Server, path: str, prompt: dict[str, Any]) -> None:
    body = prompt | {"max_tokens": 2}
    assert all(chunk["choices"] for chunk in server.stream(path, **body))
    chunks = server.stream(path, stream_options={"include_usage": True}, **body)
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_x19_index_is_that_of_the_choice(server: Server) -> None:
    chunks = server.stream(COMPLETIONS, prompt="Once", max_tokens=6, ignore_eos=True)
    assert len(chunks) > 2
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0}
    assert json.dumps(chunks).count('"finish_reason": "length"') == 1
