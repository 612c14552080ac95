"""GET /metrics."""

import asyncio
import logging

import pytest
from fastapi import FastAPI
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from model_runtime.rank_stats import RankStats
from server.errors import InternalError, Overloaded
from server.wire import Event
from tests.server.exchange import Exchange, call, chat, complete, run
from tests.server.fakes import FakeEngine, make_app, make_stats, says
from tests.server.test_stream import ends, raises


def scrape(app: FastAPI) -> dict[str, float]:
    """Samples by name, with `{finished_reason}` where there is one and without buckets."""
    answer = run(call(app, "GET", "/metrics"))
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            if "le" not in sample.labels and not sample.name.endswith("_created"):
                reason = sample.labels.get("finished_reason")
                found[sample.name.removeprefix("firstlight:") + (f"{{{reason}}}" if reason else "")] = sample.value
    return found


def rank_stats(rank: int) -> RankStats:
    return RankStats(
        rank=rank,
        steps=7,
        step_seconds=0.5 + rank,
        collectives=420,
        sent_bytes=2**20,
        collective_seconds=0.25,
        waiting_seconds=0.125,
        expert_tokens=900,
    )


def rank_series(app: FastAPI) -> dict[tuple[str, str], float]:
    """By name and rank."""
    return {
        (sample.name.removeprefix("firstlight:rank_").removesuffix("_total"), sample.labels["rank"]): sample.value
        for family in text_string_to_metric_families(run(call(app, "GET", "/metrics")).body.decode())
        for sample in family.samples
        if "rank" in sample.labels
    }


def test_each_rank_has_its_series() -> None:
    engine = FakeEngine()
    engine.stats = structs.replace(make_stats(), ranks=(rank_stats(0), rank_stats(1)))
    assert rank_series(make_app(engine)) == {
        (name, rank): value
        for rank in ("0", "1")
        for name, value in {
            "steps": 7,
            "step_seconds": 0.5 + int(rank),
            "collectives": 420,
            "collective_bytes": 2**20,
            "collective_seconds": 0.25,
            "waiting_seconds": 0.125,
            "expert_tokens": 900,
        }.items()
    }


def test_counters_of_ranks_never_fall() -> None:
    """A new engine's count from 0, and its followers are heard of later."""
    engine = FakeEngine()
    app = make_app(engine)

    def steps(generation: int | None, *ranks: int) -> dict[str, float]:
        stats = structs.replace(make_stats(), generation=generation or 0, ranks=tuple(map(rank_stats, ranks)))
        engine.stats = None if generation is None else stats
        return {rank: value for (name, rank), value in rank_series(app).items() if name == "steps"}

    assert steps(0, 0, 1) == {"0": 7, "1": 7}
    assert steps(None) == {"0": 7, "1": 7}
    assert steps(1, 0) == {"0": 14, "1": 7}
    assert steps(1, 0, 1) == {"0": 14, "1": 14}
    assert steps(2, 0) == {"0": 21, "1": 14}


def test_names() -> None:
    names = scrape(make_app(FakeEngine()))
    assert set(names.values()) == {0}
    assert {name for name in names if not name.endswith(("_sum", "_count"))} == {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "encoder_cache_usage_perc",
        "images_encoded_total",
        "encoder_cache_hits_total",
        "images_received_total",
        "engine_restarts_total",
        "recovery_replays_total",
        "recovery_resumptions_total",
        "recovery_pause_seconds_total",
        "recovery_quarantines_total",
        *(f"request_success_total{{{reason}}}" for reason in ("stop", "length", "abort", "timeout", "error")),
    }
    assert {name.removesuffix("_count") for name in names if name.endswith("_count")} == {
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    }


def test_gauges_follow_the_engine_and_return_to_zero() -> None:
    """X04."""
    engine = FakeEngine(
        stats=make_stats(running=3, waiting=2, free_blocks=50, cached_blocks=25, prompt_tokens=7, generation_tokens=9)
    )
    app = make_app(engine)
    seen = scrape(app)
    assert (seen["num_requests_running"], seen["num_requests_waiting"], seen["kv_cache_usage_perc"]) == (3, 2, 0.5)
    assert (seen["prompt_tokens_total"], seen["generation_tokens_total"]) == (7, 9)
    for stats in (make_stats(), None):
        engine.stats = stats
        seen = scrape(app)
        assert (seen["num_requests_running"], seen["num_requests_waiting"], seen["kv_cache_usage_perc"]) == (0, 0, 0)


def test_drafts_are_counted_by_position_and_over_restarts() -> None:
    name = "firstlight:spec_decode_num_accepted_tokens_per_pos_total"
    engine = FakeEngine(stats=make_stats(1, drafts=4, draft_tokens=9, accepted_tokens=5))
    app = make_app(engine)
    scrape(app)
    for generation, counts in ((1, (3, 2)), (2, (1,)), (2, (1, 1, 1))):
        engine.stats = structs.replace(make_stats(generation), accepted_per_position=counts)
        answer = run(call(app, "GET", "/metrics"))
    lines = [line for line in answer.body.decode().splitlines() if line.startswith(name)]
    assert lines == [
        f'{name}{{engine="0",model_name="tiny",position="{place}"}} {n}.0' for place, n in enumerate((4, 3, 1))
    ]
    seen = scrape(app)
    assert seen["spec_decode_num_drafts_total"] == 0


def test_counters_never_fall_when_the_engine_restarts() -> None:
    """X06."""
    engine = FakeEngine()
    app = make_app(engine)
    totals = []
    for stats in (
        make_stats(1, prompt_tokens=10),
        make_stats(1, prompt_tokens=15),
        None,
        make_stats(2, prompt_tokens=0),
        make_stats(2, prompt_tokens=4),
        make_stats(5, prompt_tokens=1),
    ):
        engine.stats = stats
        totals.append(scrape(app)["prompt_tokens_total"])
    assert totals == [10, 15, 15, 15, 19, 20]


def test_recovery_is_counted() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    engine.recovery.engines_lost, engine.recovery.pause_seconds = 2, 3.5
    seen = scrape(app)
    assert (seen["engine_restarts_total"], seen["recovery_pause_seconds_total"]) == (2, 3.5)


def test_ends_are_counted_by_reason_and_reconcile(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    app = make_app(engine)
    chat(app)
    chat(app, n=2, stream=True)
    complete(app, max_tokens=1)
    complete(app, prompt=["a", "b"], stop="ell")
    with caplog.at_level(logging.CRITICAL):
        for script in (ends("timeout", "ab"), raises(InternalError("x"), "ab"), raises(RuntimeError("x"), "a")):
            engine.script = script
            chat(app)
    engine.script = raises(Overloaded("full"))
    assert chat(app).status == 429
    seen = scrape(app)
    counts = {name: value for name, value in seen.items() if name.startswith("request_success_total")}
    assert counts == {
        "request_success_total{stop}": 5,
        "request_success_total{length}": 1,
        "request_success_total{abort}": 0,
        "request_success_total{timeout}": 1,
        "request_success_total{error}": 2,
    }
    for name in ("e2e_request_latency_seconds_count", "request_prompt_tokens_count", "request_generation_tokens_count"):
        assert seen[name] == 9


def test_aborts_are_counted() -> None:
    """X05."""
    engine = FakeEngine(script=says("hello world"), hold_after=2)
    app = make_app(engine)

    async def open_and_leave() -> None:
        exchange = Exchange(app, "POST", "/v1/chat/completions")
        exchange.header("content-type", "application/json")
        exchange.give(b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"stream":true}')
        running = asyncio.create_task(exchange.run())
        await exchange.wrote.wait()
        exchange.leave()
        await running

    async def many() -> None:
        await asyncio.gather(*(open_and_leave() for _ in range(20)))

    run(many())
    seen = scrape(app)
    assert seen["request_success_total{abort}"] == 20
    assert seen["request_success_total{stop}"] == 0
    assert engine.live == 0


def test_token_timing() -> None:
    def script(request: object, choice: int) -> list[Event | Exception]:
        return [Event(0, [5]), Event(0, [5, 5, 5]), Event(0, [5], finish_reason="length")]

    app = make_app(FakeEngine(script=script, delay=0.02))
    chat(app)
    seen = scrape(app)
    assert seen["time_to_first_token_seconds_count"] == 1
    assert seen["time_to_first_token_seconds_sum"] >= 0.02
    assert seen["inter_token_latency_seconds_count"] == 4
    assert 0.04 <= seen["inter_token_latency_seconds_sum"] <= seen["e2e_request_latency_seconds_sum"]
    assert seen["request_generation_tokens_sum"] == 5
    assert seen["request_prompt_tokens_sum"] == 21


def test_apps_do_not_share_metrics() -> None:
    one, other = make_app(FakeEngine()), make_app(FakeEngine())
    chat(one)
    assert scrape(one)["request_success_total{stop}"] == 1
    assert scrape(other)["request_success_total{stop}"] == 0
