"""POST /v1/embeddings."""

import asyncio
import base64
import json
import math
from typing import Any

import numpy as np
import openai
import pytest

from model_runtime.pooling_config import PoolingRecipe
from server.wire import Event
from tests.server.exchange import Answer, Exchange, call, run
from tests.server.fakes import HIDDEN_SIZE, MAX_MODEL_LEN, VOCAB_SIZE, FakeEngine, ids_of, make_app, pools, states_of
from tests.server.test_metrics import scrape
from tests.server.test_sdk import serving

PATH = "/v1/embeddings"
LAST, MEAN = PoolingRecipe(kind="last", normalise=False), PoolingRecipe(kind="mean", normalise=False)


def engine_that_pools(**options: Any) -> FakeEngine:
    return FakeEngine(script=pools, **options)


def embed(recipe: PoolingRecipe | None, engine: FakeEngine | None = None, **fields: Any) -> Answer:
    """A request for the vector of "hi", changed by `fields`."""
    app = make_app(engine or engine_that_pools(), recipe=recipe)
    return run(call(app, "POST", PATH, {"model": "tiny", "input": "hi"} | fields))


def vectors(answer: Answer) -> list[list[float]]:
    assert answer.status == 200, answer.body
    assert [entry["index"] for entry in answer.json["data"]] == list(range(len(answer.json["data"])))
    return [entry["embedding"] for entry in answer.json["data"]]


def test_shape() -> None:
    engine = engine_that_pools()
    answer = embed(LAST, engine, priority=-3, cache_salt="s", user="ann", request_id="mine")
    last = states_of(ids_of("hi"))[-1]
    assert answer.json == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": last}],
        "model": "tiny",
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }
    assert answer.headers["x-request-id"] == "mine"
    assert "x-ignored-params" not in answer.headers
    (asked,) = engine.requests
    assert (asked.pooling, asked.priority, asked.cache_salt, asked.n) == ("last", -3, b"s", 1)
    assert (engine.live, engine.reserved, engine.cancelled) == (0, 0, 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hello", [ids_of("hello")]),
        (["ab", "c"], [ids_of("ab"), ids_of("c")]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_inputs(given: object, expected: list[list[int]]) -> None:
    engine = engine_that_pools()
    answer = embed(MEAN, engine, input=given)
    assert [request.prompt_ids.tolist() for request in engine.requests] == expected
    assert vectors(answer) == [np.mean(states_of(ids), axis=0).tolist() for ids in expected]
    assert answer.json["usage"]["total_tokens"] == sum(map(len, expected))


def test_base64_holds_the_same_float32_numbers() -> None:
    recipe = PoolingRecipe(kind="mean")
    (encoded,) = vectors(embed(recipe, encoding_format="base64"))
    assert isinstance(encoded, str)
    decoded = np.frombuffer(base64.b64decode(encoded), dtype="<f4")
    (floats,) = vectors(embed(recipe, encoding_format="float"))
    assert decoded.tolist() == floats
    assert np.linalg.norm(decoded.astype(float)) == pytest.approx(1, abs=1e-6)


def test_openai_sdk() -> None:
    """Its default is base64, which it decodes."""
    texts = ["hello", "world"]
    with (
        serving(engine_that_pools(), recipe=LAST) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
    ):
        answers = [
            client.embeddings.create(model="tiny", input=texts),
            client.embeddings.create(model="tiny", input=texts, encoding_format="float"),
        ]
    for answer in answers:
        assert [entry.embedding for entry in answer.data] == [states_of(ids_of(text))[-1] for text in texts]
        assert [entry.index for entry in answer.data] == [0, 1]
        assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == ("tiny", 6, 6)


CUT = PoolingRecipe(kind="last", can_be_cut=True)


@pytest.mark.parametrize("recipe", [CUT, PoolingRecipe(kind="last", can_be_cut=True, lengths=(2, 3))])
def test_dimensions_of_a_model_that_was_trained_for_it(recipe: PoolingRecipe) -> None:
    (found,) = vectors(embed(recipe, input=[8], dimensions=3))
    length = math.hypot(8, 1)
    assert found == pytest.approx([8 / length, 0, -1 / length], abs=1e-7)


@pytest.mark.parametrize("recipe", [LAST, CUT])
def test_all_dimensions_may_be_asked_for(recipe: PoolingRecipe) -> None:
    assert vectors(embed(recipe, dimensions=HIDDEN_SIZE)) == vectors(embed(recipe))


@pytest.mark.parametrize(
    ("recipe", "dimensions", "message"),
    [
        (LAST, 3, "have 4 dimensions and were not trained to be cut"),
        (CUT, 5, "dimensions 5 exceeds the 4"),
        (PoolingRecipe(kind="last", can_be_cut=True, lengths=(2,)), 3, "none of those that the model allows: 2"),
        (CUT, 0, "greater than or equal to 1"),
    ],
)
def test_dimensions_that_cannot_be_had(recipe: PoolingRecipe, dimensions: int, message: str) -> None:
    answer = embed(recipe, dimensions=dimensions)
    assert (answer.status, answer.error["param"]) == (400, "dimensions")
    assert message in answer.error["message"]


def test_a_vector_without_a_direction_stays_finite() -> None:
    def nothing(request: object, choice: int) -> list[Event | Exception]:
        return [Event(seq_id=0, finish_reason="stop", pooled=bytes(8 * HIDDEN_SIZE))]

    assert vectors(embed(PoolingRecipe(kind="mean"), FakeEngine(script=nothing))) == [[0.0] * HIDDEN_SIZE]


def test_model_that_makes_none() -> None:
    engine = engine_that_pools()
    answer = embed(None, engine)
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "--pooling mean or --pooling last" in answer.error["message"]
    assert (engine.streams, engine.reserved) == ([], 0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [VOCAB_SIZE]}, "input"),
        ({"input": ["a"] * 129}, "input"),
        ({"input": ["a"] * 100_000}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 1.5}, "dimensions"),
        ({"truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_mistakes(fields: dict[str, Any], param: str) -> None:
    engine = engine_that_pools()
    answer = embed(LAST, engine, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert (engine.streams, engine.reserved) == ([], 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_model_that_makes_nothing_else(path: str, body: dict[str, Any]) -> None:
    engine = engine_that_pools(generates=False)
    app = make_app(engine, recipe=LAST)
    answer = run(call(app, "POST", path, {"model": "tiny"} | body))
    assert (answer.status, answer.error["param"], engine.live, engine.reserved) == (400, "model", 0, 0)
    assert "no output matrix" in answer.error["message"]
    assert run(call(app, "POST", PATH, {"model": "tiny", "input": "hi"})).status == 200


def test_unknown_model() -> None:
    assert embed(LAST, model="other").status == 404


@pytest.mark.parametrize("given", ["a" * (MAX_MODEL_LEN + 1), [5] * (MAX_MODEL_LEN + 1), "a" * 100_000])
def test_too_long_an_input(given: object) -> None:
    answer = embed(LAST, input=["b", given] if isinstance(given, str) else given)
    assert (answer.status, answer.error["param"]) == (400, "input")
    assert answer.error["code"] == "context_length_exceeded"
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in answer.error["message"]
    assert "output" not in answer.error["message"]


def test_the_longest_input_leaves_no_room_for_an_output() -> None:
    assert embed(LAST, input=[5] * MAX_MODEL_LEN).json["usage"]["prompt_tokens"] == MAX_MODEL_LEN


@pytest.mark.parametrize(("keep", "count"), [(-1, MAX_MODEL_LEN), (3, 3)])
def test_truncated(keep: int, count: int) -> None:
    engine = engine_that_pools()
    given = [5 + index % 7 for index in range(MAX_MODEL_LEN + 20)]
    assert embed(LAST, engine, input=given, truncate_prompt_tokens=keep).status == 200
    assert engine.requests[0].prompt_ids.tolist() == given[-count:]


def test_full_queue() -> None:
    assert embed(LAST, engine_that_pools(places=0)).status == 429
    engine = engine_that_pools(places=2)
    assert embed(LAST, engine, input=["a", "b", "c"]).status == 429
    assert (engine.streams, engine.reserved) == ([], 0)
    assert embed(LAST, engine, input=["a", "b"]).status == 200


@pytest.mark.parametrize(
    ("end", "status"),
    [("timeout", 408), ("error", 500), ("abort", 503), ("stop", 500)],
)
def test_one_input_that_fails_ends_all(end: str, status: int) -> None:
    """The request's time is over; the model gives no numbers; the server ends; or nothing comes at all."""

    def script(request: Any, choice: int) -> list[Event | Exception]:
        fails = request.prompt_ids[0] == 6
        return [Event(seq_id=0, finish_reason=end, message="so")] if fails else pools(request, choice)

    engine = FakeEngine(script=script)
    app = make_app(engine, recipe=LAST)
    answer = run(call(app, "POST", PATH, {"model": "tiny", "input": [[5], [6], [7]]}))
    assert answer.status == status
    assert engine.live == 0
    found = scrape(app)
    reason = "timeout" if end == "timeout" else "error"
    assert (found["request_success_total{stop}"], found[f"request_success_total{{{reason}}}"]) == (1, 2)


def test_metrics_count_inputs() -> None:
    app = make_app(engine_that_pools(), recipe=LAST)
    run(call(app, "POST", PATH, {"model": "tiny", "input": ["ab", "cde"]}))
    found = scrape(app)
    assert found["request_success_total{stop}"] == found["request_prompt_tokens_count"] == 2
    assert (found["request_prompt_tokens_sum"], found["request_generation_tokens_sum"]) == (5, 0)


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
def test_leaving_cancels_every_input(spec_version: str) -> None:
    engine = engine_that_pools(hold_after=0)
    app = make_app(engine, recipe=MEAN)

    async def scenario() -> int:
        exchange = Exchange(app, "POST", PATH, spec_version=spec_version)
        exchange.header("content-type", "application/json")
        exchange.give(json.dumps({"model": "tiny", "input": ["a", "b", "c"]}).encode())
        running = asyncio.create_task(exchange.run())
        while engine.live < 3:
            await asyncio.sleep(0)
        exchange.leave()
        await running
        return exchange.answer.status

    assert run(scenario()) in (0, 499)
    assert (engine.live, engine.reserved, engine.cancelled) == (0, 0, 3)
    assert scrape(app)["request_success_total{abort}"] == 3


def test_keys() -> None:
    app = make_app(engine_that_pools(), recipe=LAST, api_key=("sesame",))
    body = {"model": "tiny", "input": "hi"}
    assert run(call(app, "POST", PATH, body)).status == 401
    assert run(call(app, "POST", PATH, body, headers={"authorization": "Bearer sesame"})).status == 200
