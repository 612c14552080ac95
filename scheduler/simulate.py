"""Random steps against a fake runtime, with everything checked at every step; and capacity questions on the command
line (`python -m scheduler.simulate --help`). Used by tests and by people; no process of the server uses it.
"""

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from random import Random
from typing import TypeVar

from scheduler.config import SchedulerConfig
from scheduler.fake_runtime import FakeRuntime
from scheduler.plan import FAILED_TOKEN, StepPlan, ints
from scheduler.request import FinishReason, Request, SamplingParams, SchedulerError
from scheduler.scheduler import Scheduler
from scheduler.simulated_load import CostModel, Load, report, run_load
from scheduler.simulated_oracle import EOS, STOP_TOKEN, Oracle

STEPS_PER_POOL = 200
MAX_DRAIN_STEPS = 5000

Chosen = TypeVar("Chosen", CostModel, Load, SchedulerConfig)


@dataclass(slots=True)
class Summary:
    """What a simulation did; equal for equal arguments."""

    steps: int = 0
    accepted: int = 0
    refused: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    preemptions: int = 0
    prefix_hits: int = 0
    generation_tokens: int = 0
    digest: bytes = b""
    """Hash of all plans."""


def random_config(random: Random) -> tuple[SchedulerConfig, int, int]:
    """(config, blocks in the pool, longest sequence): from pools for a few tokens to pools for everything."""
    max_num_seqs = random.choice((2, 4, 8, 16))
    block_size = random.choice((1, 2, 4, 8, 16))
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + random.choice((0, 3, 20, 100)),
        prefill_share=random.choice((0.01, 0.25, 0.5, 1.0)),
        block_size=block_size,
        max_queued_requests=random.choice((0, 8, 40)),
        max_queued_tokens=random.choice((200, 1000, 100_000)),
        request_timeout=random.choice((50.0, 1e9, 1e9)),
        enable_prefix_caching=random.random() < 0.8,
    )
    return config, -(-random.choice((48, 100, 200, 400, 2000)) // block_size), random.choice((40, 100, 300))


class _World:
    """A scheduler, a runtime and the users of one pool."""

    def __init__(self, random: Random) -> None:
        self._random = random
        config, num_blocks, max_model_len = random_config(random)
        self.scheduler = Scheduler(config, num_blocks=num_blocks, max_model_len=max_model_len)
        self._runtime = FakeRuntime(num_blocks, config.block_size)
        self._max_total = min(max_model_len, num_blocks * config.block_size)
        self._arrivals = random.choice((0.1, 0.3, 0.5))
        self._now = 0.0
        self._next_id = 0
        self._live: dict[int, Oracle] = {}
        self._past_texts = [self._tokens(random.randint(1, 60)) for _ in range(3)]
        self._counters_before = self.scheduler.stats()
        self.summary = Summary()
        self._hash = blake2b()

    def step(self, *, arrivals: bool) -> None:
        """Everything that may happen between two steps, and a step."""
        while arrivals and self._random.random() < self._arrivals:
            self._add()
        self._maybe_abort()
        self._now += self._random.random()
        plan = self.scheduler.plan(self._now)
        self._check()
        assert (plan is not None) == self.scheduler.has_work(), "work without a plan, or a plan without work"
        if plan is not None:
            self._execute(plan)
        self.summary.steps += 1

    def finish(self) -> Summary:
        """Let everything end; then nothing may be left."""
        for _ in range(MAX_DRAIN_STEPS):
            if not self.scheduler.has_work():
                break
            self.step(arrivals=False)
        stats = self.scheduler.stats()
        assert not self._live, f"{len(self._live)} sequences did not end"
        assert (stats.running, stats.waiting) == (0, 0), "queues are not empty"
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks, "blocks leaked"
        assert self.summary.accepted == self.summary.finished.total(), "not one terminal event for each request"
        self.summary.preemptions, self.summary.prefix_hits = stats.preemptions, stats.prefix_hits
        self.summary.generation_tokens = stats.generation_tokens
        self.summary.digest = self._hash.digest()
        return self.summary

    def _execute(self, plan: StepPlan) -> None:
        for buffer in (plan.token_ids, plan.query_lens, plan.kv_lens, plan.block_tables, plan.sample.rows):
            self._hash.update(buffer.tobytes())
        result = self._runtime.execute(plan)
        if len(result.token_ids) and self._random.random() < 0.01:
            result.token_ids[self._random.randrange(len(result.token_ids))] = FAILED_TOKEN
        self._maybe_abort()
        self.scheduler.commit(result, self._now)
        self._check()

    def _check(self) -> None:
        """Invariants, events against the oracle, and counters that never fall."""
        self.scheduler.check_invariants()
        for event in self.scheduler.take_events():
            oracle = self._live[event.seq_id]
            oracle.check(event)
            if event.finish_reason is not None:
                del self._live[event.seq_id]
                self.summary.finished[event.finish_reason] += 1
                self._past_texts[self._random.randrange(len(self._past_texts))] = oracle.tokens
        stats = self.scheduler.stats()
        for name in ("preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "generation_tokens"):
            assert getattr(stats, name) >= getattr(self._counters_before, name), f"{name} fell"
        assert stats.prefix_hits <= stats.prefix_queries, "more hits than queries"
        self._counters_before = stats

    def _maybe_abort(self) -> None:
        if self._live and self._random.random() < 0.02:
            seq_id = self._random.choice(list(self._live))
            assert self.scheduler.abort(seq_id), "a live sequence was unknown"
            assert not self.scheduler.abort(seq_id), "aborted twice"

    def _add(self) -> None:
        request = self._random_request()
        self._next_id += 1
        try:
            self.scheduler.add(request, self._now)
        except SchedulerError:
            self.summary.refused += 1
        else:
            self.summary.accepted += 1
            self._live[request.seq_id] = Oracle(request, self._max_total)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(2, 12) for _ in range(count)]

    def _random_request(self) -> Request:
        """A prompt that often begins like an earlier text, as follow-up turns and shared system prompts do."""
        random = self._random
        prompt = self._past_texts[random.randrange(len(self._past_texts))][: random.choice((0, 8, 16, 80))]
        leader = random.choice(list(self._live)) if self._live and random.random() < 0.2 else None
        return Request(
            seq_id=self._next_id,
            prompt_ids=ints(prompt + self._tokens(random.randint(1, random.choice((4, 30))))),
            sampling=random_sampling(random),
            priority=random.choice((0, 0, 0, 1, -1)),
            deadline=self._now + 10 * random.random() if random.random() < 0.05 else None,
            cache_salt=random.choice((b"", b"", b"tenant")),
            leader=leader,
        )


def random_sampling(random: Random) -> SamplingParams:
    """Parameters of every kind; numbers are exact in float32."""
    penalised = random.random() < 0.3
    return SamplingParams(
        max_tokens=random.choice((1, 5, 40, 150)),
        min_tokens=random.choice((0, 0, 5)),
        temperature=random.choice((0.0, 0.5)),
        top_k=random.choice((0, 5)),
        top_p=random.choice((0.5, 1.0)),
        min_p=random.choice((0.0, 0.25)),
        seed=random.getrandbits(64),
        presence_penalty=0.5 if penalised else 0.0,
        frequency_penalty=random.choice((0.0, 0.25)) if penalised else 0.0,
        repetition_penalty=random.choice((1.0, 1.5)) if penalised else 1.0,
        eos_token_ids=random.choice(((), (EOS,))),
        stop_token_ids=random.choice(((), (STOP_TOKEN,))),
        logit_bias=random.choice(((), ((7, 2.0), (9, -1.5)))),
        bad_words=random.choice(((), ((5,), (6, 7), (8, 9, 10)))),
        logprobs=random.choice((-1, -1, 0, 2)),
        prompt_logprobs=random.choice((-1, -1, -1, 0, 2)),
    )


def simulate(steps: int, seed: int) -> Summary:
    """At least `steps` random steps over pools and limits of many sizes. Raises AssertionError at the first fault."""
    random = Random(seed)
    total, digest = Summary(), blake2b()
    while total.steps < steps:
        world = _World(random)
        for _ in range(min(STEPS_PER_POOL, steps - total.steps)):
            world.step(arrivals=True)
        summary = world.finish()
        total.steps += summary.steps
        total.accepted += summary.accepted
        total.refused += summary.refused
        total.finished += summary.finished
        total.preemptions += summary.preemptions
        total.prefix_hits += summary.prefix_hits
        total.generation_tokens += summary.generation_tokens
        digest.update(summary.digest)
    total.digest = digest.digest()
    return total


def _add_options(parser: argparse.ArgumentParser, kind: type[CostModel | Load | SchedulerConfig], title: str) -> None:
    """One option for each number that a dataclass declares."""
    group = parser.add_argument_group(title)
    for option in fields(kind):
        if isinstance(option.default, bool):
            continue
        group.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=type(option.default),
            default=option.default,
            help=f"{option.metadata['help']} (default {option.default})",
        )


def _pick(kind: type[Chosen], options: argparse.Namespace) -> Chosen:
    names = {option.name for option in fields(kind)}
    return kind(**{name: value for name, value in vars(options).items() if name in names})


def main() -> None:
    """Answer a capacity question."""
    parser = argparse.ArgumentParser(
        prog="python -m scheduler.simulate",
        description="How long would people wait? Runs the real scheduler against a model of the machine's speed.",
    )
    _add_options(parser, Load, "load")
    _add_options(parser, CostModel, "cost of a step, in seconds")
    _add_options(parser, SchedulerConfig, "scheduler")
    options = parser.parse_args()
    result = run_load(_pick(SchedulerConfig, options), _pick(CostModel, options), _pick(Load, options))
    sys.stdout.write(report(result) + "\n")


if __name__ == "__main__":
    main()
