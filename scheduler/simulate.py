"""Random steps against a fake runtime, with everything checked at every step; and capacity questions on the command
line (`python -m scheduler.simulate --help`). Used by tests and by people; no process of the server uses it.
"""

import argparse
import sys
from collections import Counter, deque
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from random import Random
from typing import TypeVar

from scheduler.config import SchedulerConfig, SpeculativeConfig
from scheduler.encoder_cache import EncoderLimits
from scheduler.fake_runtime import FakeRuntime
from scheduler.plan import FAILED_TOKEN, StepPlan, StepResult
from scheduler.request import FinishReason, PixelsMissing, Request, SchedulerError
from scheduler.scheduler import Scheduler
from scheduler.simulated_load import CostModel, Load, report, run_load
from scheduler.simulated_oracle import Clairvoyant, Oracle
from scheduler.simulated_requests import (
    BYTES_PER_EMBEDDING,
    Part,
    RequestMaker,
    bring_pixels,
    random_config,
    random_encoder,
    random_pictures,
)

STEPS_PER_POOL = 200
MAX_DRAIN_STEPS = 5000
STATES = 4
"""Kinds of models without states; of those with states there are this one, without drafts, and the first one."""
COUNTERS = (
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "prompt_tokens",
    "generation_tokens",
    "encoder_hits",
    "images_encoded",
)

KNOWN = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
"""In place of the texts' own repetitions there is somebody who knows them."""

SELF = SpeculativeConfig(method="self", num_speculative_tokens=4, num_draft_layers=1)
"""The fake runtime's draft model is always right, and uses the model's cache."""

MTP = SpeculativeConfig(method="mtp", num_speculative_tokens=4)
"""So is its layer for multi-token prediction, which has a cache of its own and needs the model's states."""

Chosen = TypeVar("Chosen", CostModel, Load, SchedulerConfig)


@dataclass(slots=True)
class Summary:
    """What a simulation did; equal for equal arguments."""

    steps: int = 0
    accepted: int = 0
    refused: int = 0
    finished: Counter[FinishReason] = field(default_factory=Counter)
    pooled: int = 0
    """Sequences that ended with their pooled states."""
    preemptions: int = 0
    prefix_hits: int = 0
    generation_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Drafts that became output."""
    images_encoded: int = 0
    encoder_hits: int = 0
    pixels_missing: int = 0
    """Requests that were refused because the pixels of an image were not there, and came again."""
    digest: bytes = b""
    """Hash of all plans."""


class _World:
    """A scheduler, a runtime and the users of one pool."""

    def __init__(self, random: Random, *, with_images: bool, with_states: bool) -> None:
        self._random = random
        config, num_blocks, max_model_len = random_config(random)
        pictures, encoder = random_pictures(random) if with_images else (), EncoderLimits()
        if with_images:
            config, encoder = random_encoder(random, config, pictures)
        self._config = config
        self._live: dict[int, tuple[list[Part], Request, Oracle]] = {}
        kind = random.choice((0, STATES)) if with_states else random.randrange(STATES)
        drafter = Clairvoyant(random, lambda seq_id: self._live[seq_id][2]) if kind == 0 else None
        if kind in (0, 1, 2):
            config = replace(config, speculative_config=(KNOWN, SELF, MTP)[kind])
        if with_states:
            config = replace(config, max_state_checkpoints=random.choice((0, 1, 3, 30)))
        self._most = random.choice((1, 2, 4)) if kind not in (1, 2) else 1
        self._flight: deque[tuple[StepResult, bool]] = deque()
        """Results of steps that are not committed, and whether something failed in them."""
        self.scheduler = Scheduler(
            config,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            encoder=encoder,
            drafter=drafter,
            steps_in_flight=self._most,
            has_states=with_states,
        )
        self._runtime = FakeRuntime(
            num_blocks,
            config.block_size,
            whole_spans=encoder.whole_spans,
            next_token=kind == 2,
            num_states=config.num_states if with_states else 0,
        )
        self._users = RequestMaker(random, pictures)
        self._max_total = min(max_model_len, num_blocks * config.block_size)
        self._arrivals = random.choice((0.1, 0.3, 0.5))
        self._now = 0.0
        self._next_id = 0
        self._something_fails = False
        self._counters_before = self.scheduler.stats()
        self.summary = Summary()
        self._hash = blake2b()

    def step(self, *, arrivals: bool) -> None:
        """Everything that may happen between two steps, and a step, or the end of one in flight."""
        while arrivals and self._random.random() < self._arrivals:
            self._add()
        self._maybe_abort()
        self._now += self._random.random()
        if self._random.random() < 0.01:
            self._commit(0)
            self._begin(self.scheduler.plan_relief())
            self._commit(0)
        plan = self.scheduler.plan(self._now)
        self._check()
        agree = (plan is not None) == self.scheduler.has_work()
        assert agree or self._flight, "work without a plan, or a plan without work"
        if plan is not None:
            self._begin(plan)
        self._commit(0 if plan is None else self._random.randrange(self._most))
        self.summary.steps += 1

    def finish(self) -> Summary:
        """Let everything end; then nothing may be left."""
        for _ in range(MAX_DRAIN_STEPS):
            if not self.scheduler.has_work() and not self._flight:
                break
            self.step(arrivals=False)
        stats = self.scheduler.stats()
        assert not self._live, f"{len(self._live)} sequences did not end"
        assert (stats.running, stats.waiting) == (0, 0), "queues are not empty"
        assert stats.free_blocks + stats.cached_blocks == stats.total_blocks, "blocks leaked"
        assert self.summary.accepted == self.summary.finished.total(), "not one terminal event for each request"
        self.summary.preemptions, self.summary.prefix_hits = stats.preemptions, stats.prefix_hits
        self.summary.generation_tokens = stats.generation_tokens
        self.summary.draft_tokens = stats.speculation.draft_tokens
        self.summary.accepted_tokens = stats.speculation.accepted_tokens
        self.summary.images_encoded, self.summary.encoder_hits = stats.images_encoded, stats.encoder_hits
        self.summary.digest = self._hash.digest()
        return self.summary

    def _begin(self, plan: StepPlan) -> None:
        random, jobs = self._random, plan.encode
        for buffer in (plan.token_ids, plan.kv_lens, plan.block_tables, plan.sample.rows, plan.images.rows, jobs.slots):
            self._hash.update(buffer.tobytes())
        assert len(plan.token_ids) <= self._config.max_num_batched_tokens, "the step is too large"
        num_pixels = sum(pixels.num_pixels for pixels in jobs.pixels)
        assert len(jobs.pixels) <= 1 or num_pixels <= self._config.max_encode_pixels, "too much to encode"
        failing = (random.choice(jobs.slots),) if jobs.slots and random.random() < 0.02 else ()
        result = self._runtime.execute(plan, failing)
        if len(result.token_ids) and random.random() < 0.01:
            result.token_ids[random.randrange(len(result.token_ids))] = FAILED_TOKEN
        self._flight.append((result, bool(failing) or FAILED_TOKEN in result.token_ids))
        self._maybe_abort()
        self._check()

    def _commit(self, left: int) -> None:
        """All steps but so many that stay in flight."""
        while len(self._flight) > left:
            result, self._something_fails = self._flight.popleft()
            self.scheduler.commit(result, self._now)
            encoder_bytes = self.scheduler.stats().encoder_bytes
            leaked = encoder_bytes != self._runtime.num_embeddings * BYTES_PER_EMBEDDING
            assert self._flight or not leaked, "embeddings leaked"
            self._check()
            self._something_fails = False

    def _check(self) -> None:
        """Invariants, events against the oracle, and counters that never fall."""
        self.scheduler.check_invariants()
        for event in self.scheduler.take_events():
            parts, _, oracle = self._live[event.seq_id]
            oracle.check(event)
            assert self._something_fails or event.finish_reason is not FinishReason.ERROR, event.message
            if event.finish_reason is not None:
                del self._live[event.seq_id]
                self.summary.finished[event.finish_reason] += 1
                self.summary.pooled += bool(event.pooled)
                self._users.remember([*parts, *oracle.outputs])
        stats = self.scheduler.stats()
        for name in COUNTERS:
            assert getattr(stats, name) >= getattr(self._counters_before, name), f"{name} fell"
        assert stats.prefix_hits <= stats.prefix_queries, "more hits than queries"
        self._counters_before = stats

    def _maybe_abort(self) -> None:
        if self._live and self._random.random() < 0.02:
            seq_id = self._random.choice(list(self._live))
            assert self.scheduler.abort(seq_id), "a live sequence was unknown"
            assert not self.scheduler.abort(seq_id), "aborted twice"

    def _add(self) -> None:
        parts, request = self._users.make(self._next_id, self._now, list(self._live))
        self._next_id += 1
        try:
            self._submit(request)
        except SchedulerError:
            self.summary.refused += 1
        else:
            self.summary.accepted += 1
            self._live[request.seq_id] = parts, request, Oracle(request, self._max_total)

    def _submit(self, request: Request) -> None:
        """Bring the pixels that no live request has brought, sometimes more, rarely fewer; then again with all."""
        known = {image.key for _, other, _ in self._live.values() for image in other.images.images}
        needed = {image.key for image in request.images.images} - known
        without = set() if self._random.random() < 0.3 else known
        if needed and self._random.random() < 0.1:
            without = known | {self._random.choice(sorted(needed))}
        try:
            self.scheduler.add(bring_pixels(request, without), self._now)
        except PixelsMissing:
            assert not needed.isdisjoint(without), "pixels were there"
            self.summary.pixels_missing += 1
            self.scheduler.add(bring_pixels(request, set()), self._now)
        else:
            assert needed.isdisjoint(without), "accepted without pixels"


def simulate(steps: int, seed: int, *, with_images: bool = False, with_states: bool = False) -> Summary:
    """At least `steps` random steps over pools and limits of many sizes. Raises AssertionError at the first fault."""
    random = Random(seed)
    total, digest = Summary(), blake2b()
    while total.steps < steps:
        world = _World(random, with_images=with_images, with_states=with_states)
        for _ in range(min(STEPS_PER_POOL, steps - total.steps)):
            world.step(arrivals=True)
        summary = world.finish()
        for part in fields(Summary):
            if part.name != "digest":
                setattr(total, part.name, getattr(total, part.name) + getattr(summary, part.name))
        digest.update(summary.digest)
    total.digest = digest.digest()
    return total


def _add_options(parser: argparse.ArgumentParser, kind: type[CostModel | Load | SchedulerConfig], title: str) -> None:
    """One option for each number that a dataclass declares."""
    group = parser.add_argument_group(title)
    for option in fields(kind):
        if not isinstance(option.default, int | float) or isinstance(option.default, bool):
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
