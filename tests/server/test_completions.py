"""POST /v1/completions."""

import pytest

from server.wire import Event
from tests.server.exchange import complete, finishes_of, texts_of
from tests.server.fakes import MAX_MODEL_LEN, FakeEngine, ids_of, logprob_of, make_app, says


def test_shape_and_default_length() -> None:
    engine = FakeEngine(script=says("x" * 50))
    answer = complete(make_app(engine))
    assert answer.status == 200
    assert answer.json["object"] == "text_completion"
    assert answer.json["id"] == "cmpl-" + answer.headers["x-request-id"]
    assert answer.json["choices"] == [
        {"index": 0, "text": "x" * 16, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer.json["usage"]["completion_tokens"] == 16
    assert engine.requests[0].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [ids_of("hello")]),
        (["ab", "c"], [ids_of("ab"), ids_of("c")]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_prompt_forms(prompt: object, expected: list[list[int]]) -> None:
    engine = FakeEngine()
    assert complete(make_app(engine), prompt=prompt).status == 200
    assert [request.prompt_ids.tolist() for request in engine.requests] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_index_is_prompt_times_n_plus_choice(stream: bool) -> None:
    """X19, and prompts counted once each."""

    def script(request: object, choice: int) -> list[Event | Exception]:
        return says("ABC"[request.prompt_ids[0] - 5] + str(choice))(request, choice)  # type: ignore[attr-defined,arg-type]

    engine = FakeEngine(script=script)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = complete(make_app(engine), prompt=[[5], [6], [7]], n=2, **options)
    expected = {0: "A0", 1: "A1", 2: "B0", 3: "B1", 4: "C0", 5: "C1"}
    if stream:
        assert texts_of(answer.events) == expected
        assert finishes_of(answer.events) == {index: ["stop"] for index in expected}
        usage = answer.events[-1]["usage"]
    else:
        assert {choice["index"]: choice["text"] for choice in answer.json["choices"]} == expected
        usage = answer.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 18)


def test_echo_repeats_the_prompt() -> None:
    app = make_app(FakeEngine(script=says(" world")))
    assert complete(app, prompt="hello", echo=True).json["choices"][0]["text"] == "hello world"
    assert complete(app, prompt=ids_of("hello"), echo=True).json["choices"][0]["text"] == "hello world"
    assert texts_of(complete(app, prompt="hello", echo=True, stream=True).events) == {0: "hello world"}


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_begins_with_null(stream: bool) -> None:
    """H14."""
    engine = FakeEngine(script=says("cd", reason="length"))
    answer = complete(make_app(engine), prompt="ab", echo=True, logprobs=1, top_k=1, stream=stream)
    assert answer.status == 200
    parts = [event["choices"][0]["logprobs"] for event in answer.events] if stream else []
    found = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}  # type: ignore[var-annotated]
    for part in [part for part in parts if part] if stream else [answer.json["choices"][0]["logprobs"]]:
        for name, values in part.items():
            found[name] += values
    assert found["tokens"] == ["a", "b", "c", "d"]
    assert found["text_offset"] == [0, 1, 2, 3]
    assert found["token_logprobs"] == [None, *(logprob_of(ids_of(letter)[0]) for letter in "bcd")]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][1] == {"b": logprob_of(ids_of("b")[0])}
    assert engine.requests[0].sampling.prompt_logprobs == 1


@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_max_tokens_zero_with_echo_returns_the_prompt(logprobs: int | None) -> None:
    """H14: nothing that was generated is shown or counted."""
    engine = FakeEngine(script=says("zzz"))
    answer = complete(make_app(engine), prompt="ab", echo=True, max_tokens=0, logprobs=logprobs)
    choice = answer.json["choices"][0]
    assert (answer.status, choice["text"], choice["finish_reason"]) == (200, "ab", "length")
    assert answer.json["usage"]["completion_tokens"] == 0
    assert engine.requests[0].sampling.max_tokens == 1
    if logprobs is not None:
        assert choice["logprobs"]["tokens"] == ["a", "b"]
        assert choice["logprobs"]["token_logprobs"][0] is None


def test_max_tokens_zero_without_echo_is_empty() -> None:
    answer = complete(make_app(FakeEngine()), max_tokens=0)
    assert (answer.json["choices"][0]["text"], answer.json["choices"][0]["finish_reason"]) == ("", "length")


def test_logprobs_hold_the_sampled_token_and_keep_partial_characters_apart() -> None:
    answer = complete(make_app(FakeEngine(script=says("é", reason="length"))), logprobs=1)
    logprobs = answer.json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["text_offset"] == [0, 1]
    assert [list(top) for top in logprobs["top_logprobs"]] == [["bytes:\\xc3"], ["bytes:\\xa9"]]


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [""], ["a", ""], [[5], []], None, 5, {"a": 1}, [[["a"]]], [1, "a"], [True]]
)
def test_empty_and_strange_prompts_are_refused(prompt: object) -> None:
    """X11."""
    engine = FakeEngine()
    app = make_app(engine)
    answer = complete(app, prompt=prompt)
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert (engine.streams, engine.reserved) == ([], 0)
    assert complete(app).status == 200


@pytest.mark.parametrize("prompt", [[-1], [10**6], [2**31], [2**70], [[5], [99_999]]])
def test_ids_outside_the_vocabulary_are_refused(prompt: object) -> None:
    answer = complete(make_app(FakeEngine()), prompt=prompt)
    assert (answer.status, answer.error["param"]) == (400, "prompt")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["x" * (MAX_MODEL_LEN + 5), [5] * (MAX_MODEL_LEN + 5)])
def test_over_long_prompts_get_both_numbers(prompt: object, stream: bool) -> None:
    """H04, X12: a real 400, streaming or not."""
    answer = complete(make_app(FakeEngine()), prompt=prompt, stream=stream)
    error = answer.error
    assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
    assert (error["n_ctx"], error["n_prompt_tokens"]) == (MAX_MODEL_LEN, MAX_MODEL_LEN + 5)


def test_too_many_sequences_are_refused() -> None:
    app = make_app(FakeEngine(), max_sequences_per_request=4)
    assert complete(app, prompt=["a", "b"], n=2).status == 200
    assert complete(app, prompt=["a", "b"], n=3).error["param"] == "n"
    assert complete(app, prompt=["a"] * 5).error["param"] == "prompt"
    assert complete(app, n=5).error["param"] == "n"


def test_token_ids_on_request() -> None:
    app = make_app(FakeEngine(script=says("hello", reason="length")))
    choice = complete(app, prompt="ab", return_token_ids=True).json["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids_of("ab"), ids_of("hello"))
    events = complete(app, prompt="ab", return_token_ids=True, stream=True).events
    choices = [event["choices"][0] for event in events]
    assert [choice.get("prompt_token_ids") for choice in choices] == [ids_of("ab"), None]
    assert sum((choice.get("token_ids", []) for choice in choices), []) == ids_of("hello")  # noqa: RUF017
