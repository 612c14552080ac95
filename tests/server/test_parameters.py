"""Which parameters and values a request may have: the others are refused by name, or ignored and named."""

import pytest

from server.api.body import MAX_DEPTH
from tests.server.exchange import chat, complete
from tests.server.fakes import FakeEngine, make_app


def nested(depth: int) -> dict[str, object]:
    """Objects in each other, so many."""
    return {"a": nested(depth - 1)} if depth > 1 else {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", 10**400),
        ("temperature", [0.5]),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 2),
        ("n", 0),
        ("n", -1),
        ("n", 1000),
        ("n", True),
        ("n", "2"),
        ("n", 10**30),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("seed", 1.5),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 10**30),
        ("max_tokens", "5"),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ["x"] * 10_000),
        ("stop", [""]),
        ("stop", ""),
        ("stop", 5),
        ("stop", [["a"]]),
        ("stop", "x" * 2000),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [10**6]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", list(range(200))),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"999999": 1}),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", [1]),
        ("bad_words", [""]),
        ("bad_words", "x"),
        ("logprobs", 3),
        ("logprobs", "yes"),
        ("top_logprobs", 5),
        ("stream", "true"),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("priority", 2**40),
        ("priority", "high"),
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("request_id", "a b"),
        ("request_id", "x" * 200),
        ("ignore_eos", "no"),
        ("messages", []),
        ("messages", None),
        ("messages", "hi"),
        ("messages", [[]]),
        ("messages", {}),
        ("model", None),
        ("model", 5),
        ("model", ""),
        ("tools", [{"type": "function", "function": {"name": "f.g"}}]),
        ("tools", [{"type": "function", "function": {"name": ""}}]),
        ("tools", [{"type": "function", "function": {"name": "x" * 129}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}] * 2),
        ("tools", [{"type": "function", "function": {"name": f"f{index}"}} for index in range(129)]),
        ("tools", [{"type": "web_search"}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": nested(MAX_DEPTH - 2)}}]),
        ("chat_template_kwargs", {"a": nested(MAX_DEPTH)}),
        ("tool_choice", "any"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}),
        ("parallel_tool_calls", "no"),
        ("include_reasoning", 1),
        ("reasoning_effort", "huge"),
        ("thinking_token_budget", -1),
        ("tool_choice", "required"),
        ("functions", []),
        ("function_call", "auto"),
        ("response_format", {"type": "sound"}),
        ("response_format", {"type": "json_schema"}),
        ("structured_outputs", {}),
        ("structured_outputs", {"json": {}, "regex": "a"}),
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "a"}),
        ("best_of", 2),
        ("best_of", True),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", 513),
        ("truncate_prompt_tokens", -2),
        ("chat_template_kwargs", []),
        ("chat_template_kwargs", {"a b": 1}),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"tools": []}),
        ("chat_template_kwargs", {"eos_token": "x"}),
        ("chat_template_kwargs", {"range": 1}),
        ("chat_template_kwargs", {"a": "x" * 16_384}),
        ("chat_template_kwargs", {f"a{number}": 1 for number in range(65)}),
        ("chat_template", "x"),
        ("echo", True),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: object) -> None:
    engine = FakeEngine()
    answer = chat(make_app(engine), **{field: value})
    assert answer.status == 400
    assert answer.error["param"].split("[")[0].split(".")[0] == field
    assert answer.error["type"] == "invalid_request_error"
    assert (engine.streams, engine.reserved) == ([], 0)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "king", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0]"),
        ({"role": "user", "content": None}, "messages[0]"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [5]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0].type"),
        ({"role": "tool", "content": "x"}, "messages[0]"),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, "messages[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}, None),
    ],
)
def test_bad_messages_are_refused_by_place(message: object, param: str | None) -> None:
    answer = chat(make_app(FakeEngine()), messages=[message])
    assert answer.status == 400
    assert answer.error["param"] == (param or "messages[0].tool_calls[0].function.arguments")


def test_images_are_refused_clearly() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    answer = chat(make_app(FakeEngine()), messages=[{"role": "user", "content": [part]}])
    assert answer.status == 400
    assert "images" in answer.error["message"]


@pytest.mark.parametrize("field", ["suffix", "prompt_embeds", "use_beam_search"])
def test_completions_refuse_what_would_be_wrong_to_ignore(field: str) -> None:
    answer = complete(make_app(FakeEngine()), **{field: "x"})
    assert (answer.status, answer.error["param"]) == (400, field)


@pytest.mark.parametrize("value", [True, 6, -1, "1"])
def test_completions_logprobs_is_a_small_integer(value: object) -> None:
    assert complete(make_app(FakeEngine()), logprobs=value).error["param"] == "logprobs"


def test_top_logprobs_up_to_20() -> None:
    app = make_app(FakeEngine())
    assert chat(app, logprobs=True, top_logprobs=20).status == 200
    assert chat(app, logprobs=True, top_logprobs=21).error["param"] == "top_logprobs"


def test_stream_options_with_unknown_keys_are_refused() -> None:
    answer = chat(make_app(FakeEngine()), stream=True, stream_options={"include_nothing": True})
    assert answer.error["param"] == "stream_options.include_nothing"


def test_min_tokens_above_max_tokens() -> None:
    assert chat(make_app(FakeEngine()), min_tokens=5, max_tokens=4).error["param"] == "min_tokens"


def test_unknown_model() -> None:
    answer = chat(make_app(FakeEngine()), model="gpt-x")
    assert answer.status == 404
    assert answer.error == {
        "message": "The model `gpt-x` does not exist; `tiny` is served here.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_harmless_and_neutral_parameters_pass_silently() -> None:
    fields: dict[str, object] = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "verbosity": "low",
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "best_of": 1,
        "modalities": ["text"],
    }
    for strict in (False, True):
        answer = chat(make_app(FakeEngine(), strict_params=strict), **fields)
        assert answer.status == 200
        assert "x-ignored-params" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_ignored_parameters_are_named(stream: bool) -> None:
    fields = {"zebra": 1, "mirostat": 2, "bad\nname": 1, "null": None}
    answer = chat(make_app(FakeEngine()), stream=stream, **fields)
    assert answer.status == 200
    assert answer.headers["x-ignored-params"] == "(unprintable), mirostat, zebra"
    strict = chat(make_app(FakeEngine(), strict_params=True), stream=stream, zebra=1)
    assert (strict.status, strict.error["param"]) == (400, "zebra")


def test_nested_json_is_taken_up_to_its_limit() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(MAX_DEPTH - 3)}}
    answer = chat(
        make_app(FakeEngine(max_model_len=8192)), tools=[tool], chat_template_kwargs={"a": nested(MAX_DEPTH - 1)}
    )
    assert answer.status == 200
