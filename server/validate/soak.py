"""A mixed load for as long as was asked: is every answer what it was alone, is nothing left, does no memory grow?

A server of its own, whose pools are small and therefore full soon: what grows after that is a leak.
"""

import time
from collections.abc import Sequence

from server.report.axis import Axis
from server.report.plot import Plot, Series
from server.validate.answers import Asker
from server.validate.asking import Answer, Body, Refused, complete, difference, stream
from server.validate.gate import Gate
from server.validate.images import Seen, ask, distance, made_pictures, takes_no_images
from server.validate.load import Load
from server.validate.memory_slope import slope
from server.validate.result import Check, StageResult, checked, skipped
from server.validate.serving import LocalServer

LENGTH = 512
SEQUENCES = 4
"""Of that length there is room for."""
MOST_GROWTH = 2048.0
"""Bytes of anonymous memory a request, after the warm-up."""
LEAST_GROWTH = 4 * 2**20
"""Bytes that a process must have grown by before a slope means anything."""
SAMPLES = 150
SAMPLE_SECONDS = (0.5, 30.0)
IDLE_SECONDS = 30.0


def run(gate: Gate) -> StageResult:
    """The stage. Raises Refused, httpx.HTTPError, ServerDidNotStart."""
    length = min(LENGTH, gate.facts().max_model_len)
    gate.close()  # its memory is wanted
    block = gate.block_size
    blocks = SEQUENCES * -(-length // block)
    gate.told(0.0, "starting a server with small pools")
    small = ("--max-model-len", str(length), "--num-kv-blocks", str(blocks))
    with gate.other_server(small) as server:
        asker = Asker(gate, server)
        bodies, pictures = mix(asker), seen_pictures(asker)
        expected = [complete(asker.http, body) for body in bodies]
        load = Load(
            len(bodies) + len(pictures),
            lambda index: (
                _hear(asker, bodies[index], expected[index])
                if index < len(bodies)
                else _look(asker, *pictures[index - len(bodies)])
            ),
            lambda index, events: _leave(asker, bodies[index % len(bodies)], events),
            server.children,
            seed=1,
        )
        seconds = gate.effort.soak_seconds
        every = min(max(seconds / SAMPLES, SAMPLE_SECONDS[0]), SAMPLE_SECONDS[1])
        load.run(seconds, every, lambda passed: gate.told(passed / seconds, f"{load.ended} requests"))
        checks = [*_right(load), _nothing_left(server), _nothing_lost(server)]
    checks += growth_checks(load)
    kinds = len(bodies) + len(pictures)
    facts = (
        f"{load.ended} requests of {kinds} kinds in {seconds / 60:.3g} minutes, {load.aborted} of them left by the "
        f"client, with room for {blocks} blocks of {block} tokens.",
    )
    return StageResult(checks=tuple(checks), facts=facts, plots=(_curve(load),))


def mix(asker: Asker) -> list[Body]:
    """Each prompt greedy with a cache that knows it, and seeded with one that does not; of several lengths."""
    found = []
    for index, prompt in enumerate(asker.prompts):
        short = prompt[:100]
        found.append(asker.body(short, "soak", {"max_tokens": 4 + 4 * index}))
        found.append(asker.body(short[:40], f"soak {index}", {"temperature": 1.0, "seed": index, "max_tokens": 12}))
    return found


def seen_pictures(asker: Asker) -> list[tuple[bytes, Seen]]:
    """Pictures, and what the model says of each alone; none where it takes none."""
    try:
        return [(file, ask(asker.http, asker.model.name, file, "soak")) for file in made_pictures().values()]
    except Refused as error:
        if takes_no_images(error):
            return []
        raise


def _look(asker: Asker, picture: bytes, expected: Seen) -> str:
    found = ask(asker.http, asker.model.name, picture, "soak")
    return "" if distance(expected, found) <= asker.tolerance else f"of a picture {found.text!r}, not {expected.text!r}"


def _hear(asker: Asker, body: Body, expected: Answer) -> str:
    return difference(expected, stream(asker.http, body), asker.tolerance)


def _leave(asker: Asker, body: Body, events: int) -> str:
    """After so many events, or before the first."""
    asked = {**body, "stream": True}
    with asker.http.stream("POST", "/v1/completions", json=asked) as response:
        if response.status_code != 200:
            return response.read().decode("utf-8", "replace")[:500]
        for _ in zip(range(events), response.iter_lines(), strict=False):
            continue
    return ""


def _right(load: Load) -> list[Check]:
    problem = f"{len(load.problems)} of {load.ended}: {'; '.join(load.problems[:3])}" if load.problems else ""
    return [checked("every answer is what it was alone", problem, "server.log", f"{load.ended} requests")]


def _nothing_left(server: LocalServer) -> Check:
    name, deadline = "nothing is left when all have gone", time.monotonic() + IDLE_SECONDS
    while not (is_idle := server.is_idle()) and time.monotonic() < deadline:
        time.sleep(0.1)
    problem = "" if is_idle else f"sequences or blocks are still held after {IDLE_SECONDS:.0f} s"
    return checked(name, problem, "/health/progress; the scheduler's ends of aborted sequences")


def _nothing_lost(server: LocalServer) -> Check:
    lost = int(server.metric("engine_restarts_total"))
    return checked("no engine was lost", f"{lost} were" if lost else "", "server.log", f"{lost}", "0")


def growth_checks(load: Load) -> list[Check]:
    """Of each kind of process."""
    checks = []
    for title, lives in sorted(load.lives.items()):
        name, growth = f"memory does not grow with requests: {title}", slope(list(lives.values()))
        warm = [life.warm() for life in lives.values()]
        asked = max((float(points[:, 0].max() - points[:, 0].min()) for points in warm if len(points)), default=0.0)
        if not asked:
            checks.append(skipped(name, "too few requests ended"))
            continue
        limit = max(MOST_GROWTH, LEAST_GROWTH / asked)
        problem = "" if growth <= limit else f"{growth / 1024:.1f} KiB a request over {asked:.0f} requests"
        advice = "what is kept for each request in that process, and not given up at its end"
        value, most = f"{growth / 1024:+.2f} KiB a request", f"at most {limit / 1024:.1f} KiB"
        checks.append(checked(name, problem, advice, value, most))
    return checks


def _curve(load: Load) -> Plot:
    """Anonymous memory over time, a line for each process."""
    titles = sorted({title for _, title, _ in load.curve})
    series = [Series(name=title, points=_points(load.curve, title)) for title in titles]
    return Plot(title="Memory", x=Axis(label="s"), y=Axis(label="MiB", from_zero=True), series=series)


def _points(curve: Sequence[tuple[float, str, int]], title: str) -> list[tuple[float, float]]:
    return [(seconds, size / 2**20) for seconds, found, size in curve if found == title]
