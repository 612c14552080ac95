"""Time to the first token and tokens a second, over prompt lengths and numbers of streams; and whether that is what
this machine should give.

The load is that of `firstlight loadtest`, over HTTP. Rates are held against what the machine can do in the same minutes
(`machine.py`): a share of its bandwidth for one stream, whose every token reads all weights, and a share of its
operations a second for prompts.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.runner import LevelResult, Runner, Subject
from loadtest.settings import Level, LoadTestError, Server, Settings, Shape
from server.report.axis import Axis
from server.report.plot import Plot, Series
from server.validate.gate import Gate, ModelFacts
from server.validate.machine import Limits, measured
from server.validate.result import Check, StageResult, Table, checked, skipped
from server.validate.serving import LocalServer

OUTPUT_TOKENS = 32
REQUESTS_PER_STREAM = 2
LEAST_REQUESTS = 3
LEAST_DECODE_SHARE = 0.15
"""Of the bandwidth with which a stream alone must read the weights. Compiled kernels reach 0.4 to 0.7 with SmolLM2 on
two cores, plain torch 0.03."""
LEAST_PREFILL_SHARE = 0.15
"""Of torch's rate of float32 products. Compiled kernels are at 1 or above."""
SMALLEST_MIB = 50.0
"""Weights that take less are read in less time than everything else of a step takes."""
DESCRIPTION = re.compile(r"([\d.]+) M parameters in (\d+) MiB")
HEAD = ("prompt tokens", "streams", "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "output tokens/s", "all tokens/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """As the server says."""

    parameters: float
    num_bytes: float


def run(gate: Gate) -> StageResult:
    """The stage. Raises httpx.HTTPError, ServerDidNotStart."""
    server = gate.server()
    before = measured() if gate.config.runtime.device == "cpu" else None
    try:
        results, left_out = _measure(gate, server, gate.facts())
    except LoadTestError as error:
        return StageResult(checks=(checked("requests under load", str(error), "server.log"),))
    after = measured() if gate.config.runtime.device == "cpu" else None
    weights = weights_of(server.started)
    checks = [_all_answered(list(results.values()))]
    alone = {length: result for (length, count), result in results.items() if count == 1}
    if alone:
        shortest, longest = alone[min(alone)], alone[max(alone)]
        checks += speed_checks(shortest, longest, max(alone), weights, before, after)
    facts = [f"{OUTPUT_TOKENS} output tokens a request."]
    if before is not None and after is not None:
        reads, flops = (f"{one:.3g} and {other:.3g}" for one, other in zip(*map(_limits, (before, after)), strict=True))
        facts.append(f"Before and after, the machine read {reads} GB/s and did {flops} GFLOP/s.")
    if left_out:
        facts.append(f"Not measured, since it would have taken too long: {', '.join(left_out)}.")
    return StageResult(checks=tuple(checks), facts=tuple(facts), plots=plots(results), tables=(_table(results),))


def _limits(limits: Limits) -> tuple[float, float]:
    return limits.read_bytes_s / 1e9, limits.flops / 1e9


Results = dict[tuple[int, int], LevelResult]
"""By prompt length and number of streams."""


def _measure(gate: Gate, server: LocalServer, model: ModelFacts) -> tuple[Results, list[str]]:
    """As much as there is time for, cheapest first. Raises LoadTestError."""
    effort = gate.effort
    room = model.max_model_len - OUTPUT_TOKENS
    lengths = [length for length in effort.input_lengths if length <= room] or [max(1, room // 2)]
    pairs = [(length, count) for length in lengths for count in effort.concurrencies]
    pairs.sort(key=lambda pair: pair[0] * _requests(pair[1]))
    results: Results = {}
    left_out: list[str] = []
    start, rate = time.monotonic(), 0.0
    for index, (length, count) in enumerate(pairs):
        tokens = _requests(count) * (length + OUTPUT_TOKENS)
        left = effort.curve_seconds - (time.monotonic() - start)
        if results and tokens > rate * left:
            left_out.append(f"{count} streams of {length} tokens")
            continue
        gate.told(index / len(pairs), f"{count} at a time, {length} tokens")
        began = time.monotonic()
        results[length, count] = _level(gate, server, model, length, count)
        rate = tokens / (time.monotonic() - began)
    return results, left_out


def _requests(count: int) -> int:
    return max(LEAST_REQUESTS, REQUESTS_PER_STREAM * count)


def _level(gate: Gate, server: LocalServer, model: ModelFacts, length: int, count: int) -> LevelResult:
    keys = gate.config.gateway.api_key
    level = Level(concurrency=count)
    settings = Settings(
        servers=(Server(name="server", url=server.url, pid=server.process.pid),),
        levels=(level,),
        # Each level has texts of its own, so that none finds those of another in the prefix cache.
        shape=Shape(input_tokens=length, output_tokens=OUTPUT_TOKENS, seed=1000 * length + count),
        model=model.name,
        api="completions",
        api_key=keys[0] if keys else None,
        requests=_requests(count),
        warmup=1,
        ignore_eos=True,
        extra_body={},
        goodput={},
    )
    runner = Runner(settings)
    subject: Subject = runner.prepare(settings.servers[0])
    runner.warm_up(subject)
    return runner.level(subject, level, lambda record: None)


def _all_answered(results: Sequence[LevelResult]) -> Check:
    asked = sum(result.metrics.requests for result in results)
    errors = [f"{number} x {kind}" for result in results for kind, number in result.metrics.errors.items()]
    problem = "; ".join(errors) if errors else ""
    return checked("all requests are answered under load", problem, "server.log", f"{asked} requests")


def weights_of(started: str) -> Weights | None:
    """Of the line that the server prints when it is ready."""
    found = DESCRIPTION.search(started)
    if found is None:
        return None
    return Weights(parameters=float(found[1]) * 1e6, num_bytes=float(found[2]) * 2**20)


def speed_checks(
    decode: LevelResult,
    prefill: LevelResult,
    length: int,
    weights: Weights | None,
    before: Limits | None,
    after: Limits | None,
) -> list[Check]:
    """Of one stream: reading weights, and computing a prompt of `length` tokens."""
    names = ("a stream alone reads the weights fast enough", "a prompt is computed fast enough")
    if weights is None or before is None or after is None:
        return [skipped(name, "the limits of the device are not known") for name in names]
    if weights.num_bytes < SMALLEST_MIB * 2**20:
        return [skipped(name, f"weights below {SMALLEST_MIB:.0f} MiB say nothing about the machine") for name in names]
    tpot, ttft = decode.metrics.tpot_ms, prefill.metrics.ttft_ms
    if tpot is None or ttft is None:
        return [skipped(name, "no request succeeded") for name in names]
    bandwidth, flops = (min(pair) for pair in zip(*map(_limits, (before, after)), strict=True))
    reading = weights.num_bytes / tpot.p50 * 1e3 / 1e9
    computing = 2 * weights.parameters * length / ttft.p50 * 1e3 / 1e9
    advice = "which kernels compute: firstlight doctor, and 'compiled kernels' in the line of the start"
    return [
        _share(names[0], reading, bandwidth, "GB/s", LEAST_DECODE_SHARE, advice),
        _share(names[1], computing, flops, "GFLOP/s", LEAST_PREFILL_SHARE, advice),
    ]


def _share(name: str, rate: float, limit: float, unit: str, least: float, advice: str) -> Check:
    share = rate / limit
    problem = "" if share >= least else f"{rate:.3g} {unit} is {share:.0%} of what the machine gives"
    return checked(name, problem, advice, f"{rate:.3g} {unit}, {share:.0%}", f"at least {least:.0%} of {limit:.3g}")


def _table(results: Results) -> Table:
    rows = []
    for (length, count), result in sorted(results.items()):
        found = result.metrics
        ttft, tpot = found.ttft_ms, found.tpot_ms
        times = (ttft.p50 if ttft else None, ttft.p99 if ttft else None, tpot.p50 if tpot else None)
        rows.append((length, count, *times, found.output_tokens_per_second, found.total_tokens_per_second))
    return Table(head=HEAD, rows=tuple(rows))


def plots(results: Results) -> tuple[Plot, ...]:
    """A line for each prompt length, over the number of streams."""
    rates: dict[int, list[tuple[float, float]]] = {}
    waits: dict[int, list[tuple[float, float]]] = {}
    for (length, count), result in sorted(results.items()):
        rates.setdefault(length, []).append((count, result.metrics.output_tokens_per_second))
        if (ttft := result.metrics.ttft_ms) is not None:
            waits.setdefault(length, []).append((count, ttft.p50))
    streams = Axis(label="streams at a time", base=2)
    return (
        Plot(title="Output tokens a second", x=streams, y=Axis(label="tokens/s", from_zero=True), series=_lines(rates)),
        Plot(title="Time to first token, median", x=streams, y=Axis(label="ms", base=10), series=_lines(waits)),
    )


def _lines(found: dict[int, list[tuple[float, float]]]) -> list[Series]:
    return [Series(name=f"{length} prompt tokens", points=points) for length, points in found.items()]
