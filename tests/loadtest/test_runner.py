"""Whole levels against a server whose times are known."""

import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from loadtest.http_client import Target
from loadtest.record import Record
from loadtest.resources import CpuMeter, find_server
from loadtest.runner import LevelResult, Runner
from loadtest.settings import LoadTestError
from tests.loadtest.fake_server import OVERHEAD, FakeServer, Served, running
from tests.loadtest.helpers import settings

SHORT = ("--input-tokens", "40", "--output-tokens", "8", "--warmup", "0")


def run(server: FakeServer, *words: str) -> LevelResult:
    """One level."""
    (result,) = run_all(server, *words)
    return result


def run_all(server: FakeServer, *words: str) -> list[LevelResult]:
    asked = settings("--url", server.url, *SHORT, *words)
    runner = Runner(asked)
    subject = runner.prepare(asked.servers[0])
    return [runner.level(subject, level, lambda record: None) for level in asked.levels]


def first_words(served: Served) -> str:
    return str(served.body["messages"][-1]["content"])[:80]


def by_time(records: Sequence[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.start)


def test_times_agree_with_what_the_server_did() -> None:
    """Within what a busy machine may add: medians within 20 ms, while the figures themselves are 100 and 20 ms."""
    with running(FakeServer(ttft=0.1, gap=0.02)) as server:
        result = run(server, "--concurrency", "4", "--requests", "12")
    metrics, served = result.metrics, server.completions
    assert (metrics.requests, metrics.succeeded, len(served), server.most_at_once) == (12, 12, 12, 4)
    assert metrics.mean_input_tokens == 40 and metrics.mean_output_tokens == 8
    assert metrics.cached_share == pytest.approx(4 / 40)
    assert metrics.ttft_ms is not None and metrics.tpot_ms is not None
    true_ttft = statistics.median(one.sent[0] - one.received for one in served) * 1e3
    true_tpot = statistics.median((one.sent[-1] - one.sent[0]) / 7 for one in served) * 1e3
    assert true_ttft <= metrics.ttft_ms.p50 + 1 and metrics.ttft_ms.p50 <= true_ttft + 20
    assert metrics.tpot_ms.p50 == pytest.approx(true_tpot, abs=5)
    true_seconds = max(one.sent[-1] for one in served) - min(one.received for one in served)
    assert metrics.output_tokens_per_second == pytest.approx(96 / true_seconds, rel=0.15)


def test_every_gap_is_measured() -> None:
    with running(FakeServer(ttft=0.02, gap=0.03)) as server:
        result = run(server, "--concurrency", "1", "--requests", "2")
    gaps = sorted(gap for record in result.records for gap in record.gaps)
    assert len(gaps) == 14
    assert gaps[7] == pytest.approx(0.03, abs=0.01)


def test_prompts_are_exact_without_a_route_that_counts() -> None:
    with running(FakeServer(ttft=0, gap=0, kind="no-tokenize")) as server:
        result = run(server, "--concurrency", "2", "--requests", "4")
    assert {record.input_tokens for record in result.records} == {40}
    assert [one.path for one in server.served[:5]] == ["/v1/models", *["/tokenize", "/v1/chat/completions"] * 2]


def test_the_same_seed_sends_the_same_requests() -> None:
    sent = []
    for seed in ("1", "1", "2"):
        with running(FakeServer(ttft=0, gap=0)) as server:
            run(server, "--concurrency", "1", "--requests", "3", "--lengths", "uniform", "--seed", seed)
            sent.append([one.body for one in server.completions])
    assert sent[0] == sent[1] != sent[2]
    assert sent[0][0]["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in sent[0][0]


def test_requests_carry_what_was_asked() -> None:
    extra = ("--ignore-eos", "--extra-body", '{"temperature": 0.5, "top_k": 3}', "--api", "completions")
    with running(FakeServer(ttft=0, gap=0)) as server:
        result = run(server, "--concurrency", "1", "--requests", "2", "--model", "mine", *extra)
    body = server.completions[0].body
    assert (body["model"], body["temperature"], body["top_k"], body["ignore_eos"]) == ("mine", 0.5, 3, True)
    assert len(body["prompt"].split()) == 40 and "messages" not in body
    assert result.metrics.succeeded == 2


def test_turns_carry_the_answers_before() -> None:
    with running(FakeServer(ttft=0, gap=0)) as server:
        result = run(server, "--concurrency", "2", "--requests", "2", "--workload", "chat", "--turns", "3")
    assert result.metrics.succeeded == 6
    roles = sorted(tuple(message["role"] for message in one.body["messages"]) for one in server.completions)
    turn = ("user", "assistant")
    assert roles == sorted([("user",), (*turn, "user"), (*turn * 2, "user")] * 2)
    longest = max(server.completions, key=lambda one: len(one.body["messages"])).body["messages"]
    assert longest[1]["content"] == "word " * 8
    tokens = sorted({record.input_tokens for record in result.records})
    assert tokens == [40, 40 + 8 + 40, 40 + 2 * (8 + 40)]


def test_images_are_sent() -> None:
    with running(FakeServer(ttft=0, gap=0)) as server:
        result = run(server, "--concurrency", "1", "--requests", "2", "--workload", "images", "--image-size", "32x16")
    kinds = [[part["type"] for part in one.body["messages"][0]["content"]] for one in server.completions]
    assert kinds == [["image_url", "text"]] * 2 and result.metrics.succeeded == 2


def test_an_open_loop_keeps_its_times_whatever_the_server_does() -> None:
    """Six requests 50 ms apart to a server that takes a second for each: all come before one is answered."""
    with running(FakeServer(ttft=1.0, gap=0)) as server:
        result = run(server, "--request-rate", "20", "--arrival", "constant", "--requests", "6")
    records = by_time(result.records)
    apart = [later.scheduled - earlier.scheduled for earlier, later in itertools.pairwise(records)]
    assert apart == pytest.approx([0.05] * 5)
    assert server.most_at_once == 6
    assert all(-0.002 < record.lateness < 0.5 for record in records), "timers may be a millisecond early"


def test_streams_of_a_closed_loop_come_in_turn_where_asked() -> None:
    """0.4 s apart, where a busy machine is late for some; each is asked once, for an answer takes longer than all."""
    with running(FakeServer(ttft=2.0, gap=0)) as server:
        result = run(server, "--concurrency", "4", "--requests", "4", "--ramp", "1.6")
    starts = [record.start for record in by_time(result.records)]
    assert all(later - earlier >= 0.2 for earlier, later in itertools.pairwise(starts))
    with pytest.raises(LoadTestError, match="--ramp is for a closed loop"):
        settings("--request-rate", "2", "--ramp", "1")


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    lines = [{"offset": 100.2, "input_tokens": 30, "output_tokens": 2}, {"offset": 100, "output_tokens": 3}]
    lines[1]["messages"] = [{"role": "user", "content": "hello there"}]
    (tmp_path / "trace").write_text("\n".join(json.dumps(line) for line in lines))
    with running(FakeServer(ttft=0, gap=0)) as server:
        result = run(server, "--trace", str(tmp_path / "trace"))
    first, second = by_time(result.records)
    assert (first.input_tokens, first.output_tokens) == (OVERHEAD + 2, 3)
    assert (second.input_tokens, second.output_tokens) == (30, 2)
    assert second.scheduled - first.scheduled == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("status-429", "HTTP 429"),
        ("status-500", "HTTP 500"),
        ("broken", "connection lost"),
        ("error-event", "error in stream"),
        ("nonsense", "not a chunk"),
        ("no-done", ""),
        ("stall", "time-out"),
    ],
)
def test_failures_are_counted_by_kind(kind: str, error: str) -> None:
    with running(FakeServer(ttft=0, gap=0, kind=kind)) as server:
        seconds = "0.5" if kind == "stall" else "20"
        metrics = run(server, "--concurrency", "3", "--requests", "3", "--timeout", seconds).metrics
    expected = error or "broken stream"
    assert metrics.errors == {expected: 3} and metrics.succeeded == 0
    assert metrics.error_examples[expected]
    assert metrics.output_tokens_per_second == 0


def test_an_answer_may_end_with_its_connection() -> None:
    with running(FakeServer(ttft=0, gap=0, kind="until-close")) as server:
        metrics = run(server, "--concurrency", "2", "--requests", "4").metrics
    assert (metrics.succeeded, metrics.mean_output_tokens) == (4, 8)


@pytest.mark.parametrize(
    ("kind", "tokens", "said"),
    [("no-usage", 8, "came without usage"), ("pairs", 8, "chunks held 2.00"), ("short", 6, "ended early")],
)
def test_doubtful_loads_are_told(kind: str, tokens: int, said: str) -> None:
    with running(FakeServer(ttft=0.01, gap=0.01, kind=kind)) as server:
        result = run(server, "--concurrency", "1", "--requests", "2")
    assert result.metrics.mean_output_tokens == tokens
    assert any(said in warning for warning in result.warnings)


def test_levels_share_no_text() -> None:
    with running(FakeServer(ttft=0, gap=0)) as server:
        run_all(server, "--concurrency", "1,2", "--requests", "3")
    assert len({first_words(one) for one in server.completions}) == 6


def test_warm_up_does_not_count() -> None:
    with running(FakeServer(ttft=0, gap=0)) as server:
        asked = settings("--url", server.url, "--input-tokens", "20", "--output-tokens", "2", "--warmup", "3")
        runner = Runner(asked)
        runner.warm_up(runner.prepare(asked.servers[0]))
    assert len(server.completions) == 3


def test_nobody_there_is_told_before_anything_is_measured() -> None:
    asked = settings("--url", "http://127.0.0.1:9")
    with pytest.raises(LoadTestError, match=r"no server answers at http://127\.0\.0\.1:9"):
        Runner(asked).prepare(asked.servers[0])


def test_a_local_server_is_found_and_its_work_measured() -> None:
    """The fake one is a thread of this process, whose CPU is then both client's and server's."""
    with running(FakeServer(ttft=0, gap=0)) as server:
        pid = find_server(Target.parse(server.url))
    assert pid == os.getpid()
    meter = CpuMeter(pid)
    meter.start()
    until = time.process_time() + 0.3
    while time.process_time() < until:
        sum(index * index for index in range(10_000))
    client, seen = meter.cores()
    assert 0 < client < 1.5
    assert seen is not None and seen > 0.8 * client, "the same process, counted in hundredths of a second"
    assert CpuMeter(None).cores()[1] is None
    assert find_server(Target("192.0.2.1", 80, False, "")) is None
