"""Steps that are planned before others are committed: the same outputs, sequences divided among them."""

from collections import deque
from collections.abc import Sequence
from random import Random

import pytest

from scheduler.config import SchedulerConfig, SpeculativeConfig
from scheduler.encoder_cache import NO_ENCODER, EncoderLimits
from scheduler.fake_runtime import FakeRuntime
from scheduler.plan import StepPlan, StepResult
from scheduler.request import Request, TokenEvent
from scheduler.scheduler import Scheduler
from scheduler.simulated_requests import Part
from tests.scheduler.driving import CONFIG, ask, outputs, picture, show
from tests.scheduler.test_simulate import _requests

MAX_STEPS = 5000


class Serving:
    """A scheduler with a runtime that computes each step when it is planned, and says so later."""

    def __init__(
        self, config: SchedulerConfig, num_blocks: int, steps_in_flight: int, encoder: EncoderLimits = NO_ENCODER
    ) -> None:
        longest = 80 if encoder is NO_ENCODER else 400
        self.scheduler = Scheduler(
            config, num_blocks=num_blocks, max_model_len=longest, encoder=encoder, steps_in_flight=steps_in_flight
        )
        self._runtime = FakeRuntime(num_blocks, config.block_size, whole_spans=encoder.whole_spans)
        self._results: deque[StepResult] = deque()
        self._most = steps_in_flight
        self.plans: list[StepPlan] = []
        self.waits: list[int] = []
        """Steps in flight whenever one was waited for."""

    def step(self) -> bool:
        """Begin a step, or end one; False when nothing is left."""
        plan = self.scheduler.plan(0.0) if len(self._results) < self._most else None
        if plan is not None:
            self.plans.append(plan)
            self._results.append(self._runtime.execute(plan))
        elif self._results:
            self.waits.append(len(self._results))
            self.scheduler.commit(self._results.popleft(), 0.0)
        self.scheduler.check_invariants()
        assert plan or self._results or not self.scheduler.has_work() or self.waits, "sequences wait and none can run"
        return self.scheduler.has_work() or bool(self._results)

    def events(self) -> list[TokenEvent]:
        """Of all, when they have ended."""
        for _ in range(MAX_STEPS):
            if not self.step():
                return self.scheduler.take_events()
        raise AssertionError("the requests do not end")


def serve(requests: Sequence[Request], serving: Serving) -> dict[int, list[int]]:
    for request in requests:
        serving.scheduler.add(request, 0.0)
    return outputs(serving.events())


def alone() -> Serving:
    return Serving(SchedulerConfig(max_num_seqs=1, block_size=4, enable_prefix_caching=False), 1000, 1)


@pytest.mark.parametrize("steps_in_flight", [2, 3, 8])
@pytest.mark.parametrize(("chunk", "num_blocks"), [(13, 100), (64, 100), (30, 32), (30, 24)])
def test_outputs_do_not_depend_on_the_steps_in_flight(chunk: int, num_blocks: int, steps_in_flight: int) -> None:
    config = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=chunk, block_size=4)
    serving = Serving(config, num_blocks, steps_in_flight)
    assert serve(_requests(), serving) == serve(_requests(), alone())
    stats = serving.scheduler.stats()
    assert stats.prefix_hits > 0
    assert (stats.preemptions > 0) == (num_blocks < 100)
    assert min(steps_in_flight, 4) <= max(serving.waits) <= steps_in_flight


def test_sequences_are_divided_evenly() -> None:
    serving = Serving(CONFIG, 100, 3)
    for seq_id in range(8):
        serving.scheduler.add(ask(seq_id, 4, max_tokens=30), 0.0)
    serving.events()
    sizes = [len(plan.query_lens) for plan in serving.plans]
    assert set(sizes[30:60]) <= {2, 3}
    assert [sum(sizes[index : index + 3]) for index in range(30, 60, 3)] == [8] * 10


def pictures(random: Random, whole_spans: bool) -> list[Request]:
    known = [picture(name, *runs) for name, runs in (("A", (9,)), ("B", (9,)), ("C", (4, 4, 3)), ("D", (30,)))]
    found = []
    for seq_id in range(10):
        parts: list[Part] = [*range(2, 2 + seq_id % 5)]
        for _ in range(random.randint(1, 3)):
            parts += [random.choice(known), *[random.randrange(2, 40) for _ in range(random.randrange(6))]]
        found.append(show(seq_id, parts, rope=not whole_spans, max_tokens=9))
    return found


@pytest.mark.parametrize("whole_spans", [False, True])
@pytest.mark.parametrize("room", [45, 999])
def test_outputs_with_images_do_not_depend_on_the_steps_in_flight(room: int, whole_spans: bool) -> None:
    found = []
    for steps_in_flight, cache_bytes in ((1, 1000), (3, room)):
        config = SchedulerConfig(max_num_seqs=10, max_num_batched_tokens=43, max_encode_pixels=100, block_size=4)
        encoder = EncoderLimits(cache_bytes=cache_bytes, bytes_per_embedding=1, whole_spans=whole_spans)
        serving = Serving(config, 200, steps_in_flight, encoder)
        found.append(serve(pictures(Random(4), whole_spans), serving))
        assert max(serving.waits) == steps_in_flight
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_aborted_in_flight_is_dropped(seed: int) -> None:
    """Its blocks may be others' before its step is over, which are written after it."""
    random = Random(seed)
    expected = serve(_requests(), alone())
    serving = Serving(SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=30, block_size=4), 30, 3)
    for request in _requests():
        serving.scheduler.add(request, 0.0)
    aborted = set()
    for index in range(MAX_STEPS):
        if not serving.step():
            break
        if index % 10 == 5 and len(aborted) < 6:
            seq_id = random.randrange(12)
            if serving.scheduler.abort(seq_id):
                aborted.add(seq_id)
            serving.scheduler.check_invariants()
    found = outputs(serving.scheduler.take_events())
    assert aborted
    for seq_id, tokens in expected.items():
        count = len(found.get(seq_id, [])) if seq_id in aborted else len(tokens)
        assert found.get(seq_id, []) == tokens[:count]


def test_there_are_no_more_steps_than_may_be() -> None:
    scheduler = Scheduler(CONFIG, num_blocks=100, max_model_len=100, steps_in_flight=2)
    for seq_id in range(4):
        scheduler.add(ask(seq_id, 4), 0.0)
    assert scheduler.plan(0.0) is not None
    scheduler.add(ask(9, 4), 0.0)
    assert scheduler.plan(0.0) is not None
    with pytest.raises(AssertionError, match="step 2 was planned and not committed"):
        scheduler.plan(0.0)
    with pytest.raises(AssertionError, match="drafts follow from the step before"):
        Scheduler(
            SchedulerConfig(speculative_config=SpeculativeConfig(method="mtp", num_speculative_tokens=2)),
            num_blocks=9,
            max_model_len=99,
            steps_in_flight=2,
        )
