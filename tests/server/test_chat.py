"""POST /v1/chat/completions, answered as one JSON document."""

import pytest

from scheduler.request import SamplingParams
from server.wire import Event
from tests.server.exchange import chat
from tests.server.fakes import EOS, MAX_MODEL_LEN, TOKENIZER, FakeEngine, ids_of, logprob_of, make_app, says

PROMPT_TOKENS = (
    len("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n") - len("<|im_start|>") * 2 - len("<|im_end|>") + 3
)


def sampling(**fields: object) -> SamplingParams:
    engine = FakeEngine()
    answer = chat(make_app(engine), **fields)
    assert answer.status == 200, answer.body
    return engine.requests[0].sampling


def test_shape_of_the_answer() -> None:
    answer = chat(make_app(FakeEngine(script=says("hello world", cached=16))))
    document = answer.json
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert document["id"] == "chatcmpl-" + answer.headers["x-request-id"]
    assert (document["object"], document["model"]) == ("chat.completion", "tiny")
    assert document["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    completion = len(ids_of("hello world")) + 1
    assert document["usage"] == {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": completion,
        "total_tokens": PROMPT_TOKENS + completion,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


def test_defaults() -> None:
    params = sampling()
    assert params.max_tokens == MAX_MODEL_LEN - PROMPT_TOKENS
    assert params.eos_token_ids == (EOS,)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.logprobs, params.prompt_logprobs, params.min_tokens) == (-1, -1, 0)


def test_null_means_omitted() -> None:
    names = "temperature top_p top_k min_p n seed stop stop_token_ids logprobs top_logprobs stream stream_options tools"
    names += " max_tokens logit_bias bad_words min_tokens tool_choice response_format user priority cache_salt"
    nothing = sampling(**dict.fromkeys(names.split()))
    assert nothing.temperature == 1.0
    assert nothing.max_tokens == MAX_MODEL_LEN - PROMPT_TOKENS


@pytest.mark.parametrize(
    ("field", "value", "attribute", "expected"),
    [
        ("temperature", 0, "temperature", 0.0),
        ("temperature", 1.5, "temperature", 1.5),
        ("top_p", 0.25, "top_p", 0.25),
        ("top_k", -1, "top_k", 0),
        ("top_k", 40, "top_k", 40),
        ("min_p", 0.1, "min_p", 0.1),
        ("seed", 7, "seed", 7),
        ("seed", -1, "seed", 2**64 - 1),
        ("presence_penalty", -2, "presence_penalty", -2.0),
        ("frequency_penalty", 0.5, "frequency_penalty", 0.5),
        ("repetition_penalty", 1.1, "repetition_penalty", 1.1),
        ("stop_token_ids", [5, 6, 5], "stop_token_ids", (5, 6)),
        ("ignore_eos", True, "eos_token_ids", ()),
        ("min_tokens", 3, "min_tokens", 3),
        ("logit_bias", {"7": -100, "8": 1.5}, "logit_bias", ((7, -100.0), (8, 1.5))),
        ("bad_words", ["a"], "bad_words", ((67,), (223, 67))),
        ("max_tokens", 5, "max_tokens", 5),
        ("max_tokens", 65_535, "max_tokens", MAX_MODEL_LEN - PROMPT_TOKENS),
        ("max_completion_tokens", 6, "max_tokens", 6),
        ("logprobs", True, "logprobs", 0),
    ],
)
def test_parameters_reach_the_engine(field: str, value: object, attribute: str, expected: object) -> None:
    params = sampling(**{field: value})
    assert {name: getattr(params, name) for name in params.__slots__}[attribute] == expected


def test_request_level_parameters_reach_the_engine() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    chat(app, n=2, stop="x", include_stop_str_in_output=True, priority=-3, cache_salt="é")
    request = engine.requests[0]
    assert (request.n, request.stop, request.include_stop) == (2, ("x",), True)
    assert (request.priority, request.cache_salt) == (-3, "é".encode())


def test_max_completion_tokens_wins() -> None:
    assert sampling(max_tokens=9, max_completion_tokens=4).max_tokens == 4


def test_unseeded_requests_differ() -> None:
    assert len({sampling().seed for _ in range(5)}) == 5


def test_over_long_max_tokens_is_an_upper_bound() -> None:
    """X12: not a reservation."""
    answer = chat(make_app(FakeEngine()), max_tokens=65_535)
    assert answer.status == 200
    assert answer.json["choices"][0]["finish_reason"] == "stop"


def test_choices_are_in_order_and_prompt_counts_once() -> None:
    answer = chat(make_app(FakeEngine(script=says("hello", "hell", "he"))), n=3)
    choices = answer.json["choices"]
    assert [(choice["index"], choice["message"]["content"]) for choice in choices] == [
        (0, "hello"),
        (1, "hell"),
        (2, "he"),
    ]
    assert answer.json["usage"]["prompt_tokens"] == PROMPT_TOKENS
    assert answer.json["usage"]["completion_tokens"] == 6


def test_stop_string_ends_the_text_and_cancels_the_choice() -> None:
    engine = FakeEngine(script=says("one two three", reason="length"))
    answer = chat(make_app(engine), stop=["ZZ", "wo t"])
    choice = answer.json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("one t", "stop", "wo t")
    assert answer.json["usage"]["completion_tokens"] == len("one two t")
    assert engine.streams[0].finished_by_gateway == [0]
    assert engine.live == 0


def test_stop_string_can_be_included() -> None:
    answer = chat(make_app(FakeEngine(script=says("one two"))), stop="tw", include_stop_str_in_output=True)
    assert answer.json["choices"][0]["message"]["content"] == "one tw"


def test_length() -> None:
    answer = chat(make_app(FakeEngine(script=says("abcdef"))), max_tokens=3)
    choice = answer.json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "length")
    assert answer.json["usage"]["completion_tokens"] == 3


def test_logprobs() -> None:
    answer = chat(make_app(FakeEngine(script=says("hello é"))), logprobs=True, top_logprobs=2)
    content = answer.json["choices"][0]["logprobs"]["content"]
    ids = ids_of("hello é")
    assert [entry["logprob"] for entry in content] == [logprob_of(token_id) for token_id in ids]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == "hello é".encode()
    assert [entry["token"] for entry in content] == ["hello", " ", "�", "�"]
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 2
        assert values == sorted(values, reverse=True)


def test_logprobs_end_where_a_stop_string_cuts() -> None:
    answer = chat(make_app(FakeEngine(script=says("a hello b"))), logprobs=True, stop="llo")
    choice = answer.json["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "a he"
    assert [bytes(entry["bytes"]) for entry in content] == [b"a", b" ", b"he"]


def test_token_ids_on_request() -> None:
    document = chat(make_app(FakeEngine(script=says("hello"))), return_token_ids=True).json
    assert document["choices"][0]["token_ids"] == [*ids_of("hello"), EOS]
    assert len(document["prompt_token_ids"]) == PROMPT_TOKENS
    assert TOKENIZER.decode(document["prompt_token_ids"], skip_special_tokens=False).startswith("<|im_start|>user\nhi")


def test_content_may_be_parts_and_roles_are_all_known() -> None:
    engine = FakeEngine()
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "t", "tool_call_id": "c"},
    ]
    assert chat(make_app(engine), messages=messages).status == 200
    text = TOKENIZER.decode(engine.requests[0].prompt_ids, skip_special_tokens=False)
    assert [part.split("\n")[0] for part in text.split("<|im_start|>")[1:]] == [
        "system",
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert "user\nResult of f:\nt<|im_end|>" in text


def test_aliases_are_echoed() -> None:
    app = make_app(FakeEngine(), served_model_name="big, small")
    assert chat(app, model="small").json["model"] == "small"
    assert chat(app, model="tiny").status == 404


def test_stop_token_is_hidden_but_reported() -> None:
    def script(request: object, choice: int) -> list[Event | Exception]:
        return [Event(0, ids_of("ab")), Event(0, ids_of("x"), finish_reason="stop", stop_token_id=ids_of("x")[0])]

    answer = chat(make_app(FakeEngine(script=script)), stop_token_ids=ids_of("x")).json["choices"][0]
    assert (answer["message"]["content"], answer["stop_reason"]) == ("ab", ids_of("x")[0])
    shown = chat(make_app(FakeEngine(script=script)), stop_token_ids=ids_of("x"), include_stop_str_in_output=True)
    assert shown.json["choices"][0]["message"]["content"] == "abx"


def test_empty_content_is_valid() -> None:
    """X11."""
    assert chat(make_app(FakeEngine()), messages=[{"role": "user", "content": ""}]).status == 200
