"""The OpenAPI document and the server, held against each other by schemathesis."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.end_to_end.conftest import Server

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(300),
    # schemathesis touches names that its own dependencies have deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:jsonschema", "ignore::DeprecationWarning:schemathesis"),
]

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    allow_header_conformance,
    negative_data_rejection,
]
OPERATIONS = (
    "POST /v1/chat/completions",
    "POST /v1/chat/completions/input_tokens",
    "POST /v1/completions",
    "POST /v1/embeddings",
    "POST /v1/responses",
    "POST /v1/responses/input_tokens",
    "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}",
    "POST /v1/responses/{response_id}/cancel",
    "GET /v1/responses/{response_id}/input_items",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "GET /v1/models",
    "GET /v1/models/{model_id}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /health",
    "GET /health/live",
    "GET /health/ready",
    "GET /health/progress",
    "GET /metrics",
)
WITH_BODIES = tuple(name for name in OPERATIONS if name.startswith("POST") and "{" not in name)
WITHOUT_MAX_TOKENS = ("POST /v1/responses", "POST /v1/responses/input_tokens", "POST /v1/messages/count_tokens")
"""These refuse it: it is a parameter of other APIs."""
VOCABULARY = 49152
CROSS_FIELD_RULES = (
    "min_tokens",
    "stream_options",
    "tool_choice",
    "tools",
    "top_logprobs",
    "prompt_logprobs",
    "add_generation_prompt",
    "continue_final_message",
    "truncate_prompt_tokens",
    "background",
    "response_format",
    "structured_outputs",
    "ignore_eos",
    "input",
    "dimensions",
)
"""Parameters whose validity depends on other ones, or on the model: no schema says that."""
LOOSE = ("tools", "tool_choice", "text", "include", "reasoning", "previous_response_id")
"""Of the Responses API: what its schema leaves open is checked elsewhere."""

examples = settings(
    max_examples=16,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def operations(server: Server) -> dict[str, APIOperation]:
    """By method and path."""
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    named = {f"{operation.method.upper()} {operation.path}": operation for operation in found}
    assert named.keys() == set(OPERATIONS)
    return named


def _clamp(body: Any) -> None:
    """Short answers, so that the model does not take the time."""
    if not isinstance(body, dict):
        return
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "min_tokens")
    for name, most in ((name, 2) for name in limits):
        if type(body.get(name)) is int and body[name] > most:
            body[name] = most
    if body.get("max_tokens") is None:
        body["max_tokens"] = 2


def _known_ids(value: Any) -> Any:
    """Ids of the vocabulary, however deep; integers that were spelled as floats are integers."""
    if isinstance(value, list):
        return [_known_ids(item) for item in value]
    return int(value) % VOCABULARY if type(value) in (int, float) else value


def _integers(value: Any) -> Any:
    """JSON schema takes 3.0 for an integer, the server does not."""
    if isinstance(value, dict):
        return {name: _integers(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value == int(value) else value


def _fit(body: dict[str, Any], model: str) -> dict[str, Any]:
    """What the schema leaves open and only this model knows: its name, its token ids, and that it takes no images."""
    body = _integers(body)
    if "model" in body:
        body["model"] = model
    for name in ("prompt", "input", "tokens", "stop_token_ids"):
        if name in body:
            body[name] = _known_ids(body[name])
    for message in body.get("messages") or []:
        message.pop("tool_calls", None)
        if message["role"] == "tool":
            message["role"] = "user"
        for part in message["content"] if isinstance(message.get("content"), list) else []:
            if part["type"] == "image_url":
                part |= {"type": "text", "text": "an image"}
    body.pop("logit_bias", None)
    return body


def _fit_response(body: dict[str, Any]) -> None:
    """A request to the Responses API that asks for a text only."""
    body |= {"input": "hi", "max_output_tokens": 2}
    for name in LOOSE:
        body.pop(name, None)


def _fit_message(body: dict[str, Any]) -> None:
    """A request to the Messages API that asks for a text only."""
    body["messages"] = [{"role": "user", "content": "hi"}]
    for name in ("system", "tools", "tool_choice", "thinking", "output_config"):
        body.pop(name, None)


def _answer(case: Case) -> Any:
    response = case.call(timeout=60)
    case.validate_response(response, checks=CHECKS)
    return response


@pytest.mark.parametrize("name", OPERATIONS)
def test_valid_requests(server: Server, operations: dict[str, APIOperation], name: str) -> None:
    """A request that the document allows is answered as it promises; refused only for what no schema can say."""
    accepted = []

    @examples
    @given(case=operations[name].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def check(case: Case) -> None:
        if isinstance(case.body, dict):
            if "/v1/responses" in name:
                _fit_response(case.body)
            if "/v1/messages" in name:
                _fit_message(case.body)
            case.body = _fit(case.body, server.model)
            _clamp(case.body)
            if name in WITHOUT_MAX_TOKENS:
                del case.body["max_tokens"]
        response = _answer(case)
        if response.status_code == 200:
            accepted.append(case)
        elif "{" in name:
            assert response.status_code == 404
        else:
            assert response.status_code == 400
            assert response.json()["error"].get("param") in CROSS_FIELD_RULES, response.text

    check()
    assert accepted or "{" in name


@pytest.mark.parametrize("name", WITH_BODIES)
def test_invalid_requests(operations: dict[str, APIOperation], name: str) -> None:
    """A request that the document forbids is refused with 4xx, in the shape of an error."""

    @examples
    @given(case=operations[name].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def check(case: Case) -> None:
        response = _answer(case)
        assert 400 <= response.status_code < 500
        assert response.json()["error"]["message"]

    check()


def test_the_engine_is_idle_afterwards(server: Server) -> None:
    server.wait_for(lambda: server.progress()["running"] + server.progress()["waiting"] == 0, 10, "idleness")
    progress = server.progress()
    assert progress["free_blocks"] == progress["total_blocks"]
