"""Engines killed at random moments under 16 streams, whose texts must be those of an undisturbed run.

`python -m tests.chaos.kills --kills 100 [--signal STOP]` prints a report. `test_kills.py` does a few in the suite.
"""

import argparse
import random
import signal
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.end_to_end.conftest import Server, run_server, sse_events
from tests.end_to_end.test_conversation import CHAT, COMPLETIONS

SPECULATION = '{"method": "ngram", "num_speculative_tokens": 8}'
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
BUFFERED_SECONDS = 0.3
"""What arrives sooner after a kill was sent before it."""


def requests(max_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of 12 requests with 16 choices: greedy, seeded, n = 2, penalties, log-probabilities, grammars."""
    chat = {"max_tokens": max_tokens, "stream_options": {"include_usage": True}}
    found: list[tuple[str, dict[str, Any]]] = []
    for index in range(4):
        question = [{"role": "user", "content": f"Tell me a story about {index + 2} bears."}]
        found += [
            (CHAT, chat | {"messages": question, "temperature": 0, "ignore_eos": True}),
            (CHAT, chat | {"messages": question, "seed": index, "n": 2, "frequency_penalty": 0.4, "logprobs": True}),
        ]
    for index in range(2):
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        question = [{"role": "user", "content": "Who are you? Answer as JSON."}]
        found += [
            (CHAT, chat | {"messages": question, "seed": index, "response_format": form}),
            (COMPLETIONS, chat | {"prompt": "one two three " * 8, "seed": index, "min_tokens": 20, "stop": ["seven"]}),
        ]
    return found


@dataclass
class Heard:
    """What a stream said."""

    choices: dict[int, list[Any]] = field(default_factory=dict)
    """Texts, log-probabilities and ends of each choice, in order."""
    completion_tokens: int = 0
    error: str = ""


@dataclass
class Report:
    """Of all rounds."""

    kills: int = 0
    streams: int = 0
    errors: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """Seconds from a kill to the first event behind it."""


class Chaos:
    """A server, and whoever kills its engine."""

    def __init__(self, server: Server, max_tokens: int, seed: int, fault: signal.Signals) -> None:
        self._server, self._requests, self._fault = server, requests(max_tokens), fault
        self._random = random.Random(seed)
        self._arrivals: list[float] = []
        self._done = threading.Event()
        self.report = Report()

    def _listen(self, request: tuple[str, dict[str, Any]]) -> Heard:
        path, body = request
        heard = Heard()
        body = {"model": self._server.model, "stream": True, **body}
        with self._server.http.stream("POST", path, json=body, timeout=600) as response:
            if response.status_code != 200:
                return Heard(error=response.read().decode())
            for event in sse_events(response.iter_lines()):
                self._arrivals.append(time.monotonic())
                if "error" in event:
                    heard.error = str(event["error"])
                for choice in event.get("choices", ()):
                    text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    logprobs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content", ())]
                    said = heard.choices.setdefault(choice["index"], ["", [], []])
                    said[0] += text
                    said[1] += logprobs
                    said[2] += [choice["finish_reason"]] if choice["finish_reason"] else []
                heard.completion_tokens = (event.get("usage") or {}).get("completion_tokens", 0)
        return heard

    def round(self) -> list[Heard]:
        """All requests at once."""
        with ThreadPoolExecutor(len(self._requests)) as pool:
            return list(pool.map(self._listen, self._requests))

    def _kill_until_done(self, most: int, spread: float) -> None:
        """Also while an engine is starting."""
        while self.report.kills < most and not self._done.wait(self._random.uniform(0.05, spread)):
            engine = self._server.children().get("engine")
            if engine is None:
                continue
            killed_at = time.monotonic()
            try:
                engine.send_signal(self._fault)
            except psutil.NoSuchProcess:
                continue
            self.report.kills += 1
            self._wait_for_event(killed_at)

    def _wait_for_event(self, killed_at: float) -> None:
        while not self._done.wait(0.02):
            if self._arrivals[-1] > killed_at + BUFFERED_SECONDS:
                later = next(at for at in reversed(self._arrivals) if at <= killed_at + BUFFERED_SECONDS)
                first = self._arrivals[self._arrivals.index(later) + 1]
                self.report.pauses.append(first - killed_at)
                return

    def run(self, kills: int, spread: float) -> Report:
        """One undisturbed round, then rounds until the engine was killed so often."""
        undisturbed = self.round()
        assert not any(heard.error for heard in undisturbed), undisturbed
        while self.report.kills < kills:
            self._done.clear()
            killer = threading.Thread(target=self._kill_until_done, args=(kills, spread))
            killer.start()
            for (path, body), before, after in zip(self._requests, undisturbed, self.round(), strict=True):
                self.report.streams += 1
                if after.error:
                    self.report.errors.append(after.error)
                elif after != before:
                    self.report.different.append(f"{path} {body}: {before} became {after}")
            self._done.set()
            killer.join()
        return self.report


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--spread", type=float, default=3.0, help="most seconds from going on to the next kill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    arguments = parser.parse_args()
    fault = signal.Signals["SIG" + arguments.signal]
    with run_server("--speculative-config", SPECULATION, "--stall-timeout", "2") as server:
        chaos = Chaos(server, arguments.max_tokens, arguments.seed, fault)
        report = chaos.run(arguments.kills, arguments.spread)
        metrics = server.metrics()
    pauses = sorted(report.pauses)
    print(
        f"{report.kills} kills, {report.streams} streams: {len(report.errors)} errors, {len(report.different)} differ"
    )
    print(f"pause p50 {statistics.median(pauses):.2f} s, longest {pauses[-1]:.2f} s, of {len(pauses)}")
    print({name: value for name, value in metrics.items() if name.startswith(("recovery", "engine_restarts"))})
    for problem in report.errors + report.different:
        print(problem[:2000])


if __name__ == "__main__":
    main()
