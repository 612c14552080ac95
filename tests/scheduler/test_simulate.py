"""Ten thousand random steps with everything checked; and the same outputs however the work is cut up."""

import subprocess
import sys
import time
from dataclasses import replace
from random import Random

import pytest

from scheduler import state_slots
from scheduler.config import SchedulerConfig, SpeculativeConfig
from scheduler.encoder_cache import EncoderLimits
from scheduler.fake_runtime import IMAGE_TOKEN, FakeRuntime
from scheduler.plan import ImageJobs, SampleRows, StateRuns, StepPlan, ints
from scheduler.request import FinishReason, Image, PromptImages, Request, Span
from scheduler.scheduler import Scheduler
from scheduler.simulate import simulate
from scheduler.simulated_cost import LOOKUP, cost, few_words
from scheduler.simulated_load import CostModel, Load, report, run_load
from scheduler.simulated_requests import Part, bring_pixels, random_sampling
from tests.scheduler.driving import ask, make, outputs, picture, show


def test_ten_thousand_random_steps() -> None:
    start = time.process_time()
    summary = simulate(10_000, seed=1)
    assert time.process_time() - start < 10
    assert summary.steps >= 10_000
    assert set(summary.finished) == set(FinishReason) - {FinishReason.DEAD_END}  # no grammars
    assert summary.finished.total() == summary.accepted > 1000
    assert summary.pooled > 100
    assert summary.preemptions > 100
    assert summary.prefix_hits > 1000
    assert summary.refused > 100
    assert summary.draft_tokens > summary.accepted_tokens > 1000


def test_ten_thousand_random_steps_with_images() -> None:
    """Every row's embedding is checked: image, index, place; and its rotary position."""
    start = time.process_time()
    summary = simulate(10_000, seed=1, with_images=True)
    assert time.process_time() - start < 15  # five or six on a machine that does nothing else
    assert set(summary.finished) == set(FinishReason) - {FinishReason.DEAD_END}  # no grammars
    assert summary.finished.total() == summary.accepted > 1000
    assert summary.images_encoded > 500
    assert summary.encoder_hits > 400
    assert summary.prefix_hits > 500
    assert summary.preemptions > 50
    assert summary.pixels_missing > 20


@pytest.mark.parametrize("with_images", [False, True])
def test_random_steps_of_models_with_states(with_images: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slot that is read is checked, behind drafts too; checkpoints are made all along a text."""
    monkeypatch.setattr(state_slots, "MARK_TOKENS", 4)
    summary = simulate(5000, seed=3, with_images=with_images, with_states=True)
    assert summary.prefix_hits > 50
    assert summary.preemptions > 5
    assert summary.draft_tokens > summary.accepted_tokens > 100


@pytest.mark.parametrize("with_images", [False, True])
def test_same_seed_same_plans(with_images: bool) -> None:
    first, again, other = (simulate(300, seed=seed, with_images=with_images) for seed in (5, 5, 6))
    assert first == again
    assert first.digest != other.digest


def _requests() -> list[Request]:
    random = Random(3)
    common = [random.randrange(2, 40) for _ in range(20)]
    return [
        Request(
            seq_id=seq_id,
            prompt_ids=ints(common[: random.randrange(20)] + [random.randrange(2, 40) for _ in range(10)]),
            sampling=random_sampling(random),
        )
        for seq_id in range(12)
    ]


def _serve(config: SchedulerConfig, num_blocks: int) -> tuple[dict[int, list[int]], Scheduler]:
    scheduler = Scheduler(config, num_blocks=num_blocks, max_model_len=80)
    runtime = FakeRuntime(num_blocks, config.block_size)
    for request in _requests():
        scheduler.add(request, 0.0)
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.commit(runtime.execute(plan), 0.0)
    return outputs(scheduler.take_events()), scheduler


@pytest.mark.parametrize(
    ("chunk", "seats", "num_blocks", "prefix_caching"),
    [(1, 1, 100, False), (7, 4, 100, True), (64, 12, 100, True), (500, 12, 400, True), (30, 12, 22, True)],
)
def test_outputs_do_not_depend_on_how_the_work_is_cut(
    chunk: int, seats: int, num_blocks: int, prefix_caching: bool
) -> None:
    reference, _ = _serve(SchedulerConfig(max_num_seqs=1, block_size=4, enable_prefix_caching=False), 1000)
    config = SchedulerConfig(
        max_num_seqs=seats, max_num_batched_tokens=chunk, block_size=4, enable_prefix_caching=prefix_caching
    )
    result, scheduler = _serve(config, num_blocks)
    assert result == reference
    assert (scheduler.stats().preemptions > 0) == (num_blocks == 22)


def _serve_pictures(
    config: SchedulerConfig, encoder: EncoderLimits, *, rope: bool
) -> tuple[dict[int, list[int]], Scheduler]:
    random = Random(4)
    pictures = [picture(name, *runs) for name, runs in (("A", (9,)), ("B", (9,)), ("C", (4, 4, 3)), ("D", (30,)))]
    scheduler = Scheduler(config, num_blocks=200, max_model_len=400, encoder=encoder)
    runtime = FakeRuntime(200, config.block_size, whole_spans=encoder.whole_spans)
    for seq_id in range(12):
        parts: list[Part] = [*range(2, 2 + seq_id % 5)]
        for _ in range(random.randint(1, 4)):
            parts += [random.choice(pictures), *[random.randrange(2, 40) for _ in range(random.randrange(6))]]
        scheduler.add(show(seq_id, parts, rope=rope, max_tokens=12), 0.0)
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.commit(runtime.execute(plan), 0.0)
    return outputs(scheduler.take_events()), scheduler


@pytest.mark.parametrize("whole_spans", [False, True])
@pytest.mark.parametrize(
    ("step_tokens", "seats", "room", "max_pixels"),
    [(31, 1, 30, 1), (43, 12, 30, 10), (99, 12, 45, 500), (500, 12, 999, 9999)],
)
def test_outputs_with_images_do_not_depend_on_how_the_work_is_cut(
    step_tokens: int, seats: int, room: int, max_pixels: int, whole_spans: bool
) -> None:
    rope = not whole_spans
    alone = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1000, block_size=4, enable_prefix_caching=False)
    reference, _ = _serve_pictures(alone, EncoderLimits(cache_bytes=1000, bytes_per_embedding=1), rope=rope)
    config = SchedulerConfig(
        max_num_seqs=seats, max_num_batched_tokens=step_tokens, max_encode_pixels=max_pixels, block_size=4
    )
    encoder = EncoderLimits(cache_bytes=room, bytes_per_embedding=1, whole_spans=whole_spans)
    result, scheduler = _serve_pictures(config, encoder, rope=rope)
    assert result == reference
    assert (scheduler.stats().images_encoded == 4) == (room == 999)
    assert scheduler.stats().prefix_hits > 0


def _plan(**changes: list[int]) -> StepPlan:
    scheduler = Scheduler(SchedulerConfig(block_size=4), num_blocks=4, max_model_len=100)
    scheduler.add(ask(0, 12), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    buffers = {name: getattr(plan, name) for name in ("token_ids", "query_lens", "kv_lens", "block_tables")}
    buffers |= {name: ints(values) for name, values in changes.items()}
    return StepPlan(step_id=1, sample=SampleRows(), score=plan.score, **buffers)


def test_fake_runtime_notices_wrong_plans() -> None:
    """The simulation can only prove what its runtime would notice."""
    right = _plan()
    length = len(right.token_ids)
    assert FakeRuntime(4, 4).execute(right).step_id == 1
    with pytest.raises(AssertionError, match="holds something else"):
        FakeRuntime(4, 4).execute(_plan(query_lens=[1], token_ids=[3]))  # the beginning was never computed
    with pytest.raises(AssertionError, match="cover kv_lens exactly"):
        FakeRuntime(4, 4).execute(_plan(block_tables=[0]))
    with pytest.raises(AssertionError, match="written and used"):
        FakeRuntime(4, 4).execute(_plan(token_ids=[1, 2], query_lens=[1, 1], kv_lens=[1, 1], block_tables=[0, 0]))
    runtime = FakeRuntime(4, 4)
    runtime.execute(right)
    runtime.execute(_plan(token_ids=[9, 9], query_lens=[2], kv_lens=[2], block_tables=[1]))  # overwrites block 1
    with pytest.raises(AssertionError, match="holds something else"):
        runtime.execute(_plan(token_ids=[5], query_lens=[1], kv_lens=[length + 1], block_tables=[0, 1, 2, 3]))


def test_fake_runtime_notices_wrong_states() -> None:
    right = replace(_plan(), states=StateRuns(ends=ints([8, 12]), reads=ints([-1, 3]), writes=ints([3, 0])))
    FakeRuntime(4, 4, num_states=4).execute(right)
    wrong: list[tuple[str, list[int], list[int], list[int]]] = [
        ("do not cover", [8], [-1], [3]),
        ("begins with a state", [8, 12], [2, 3], [3, 0]),
        ("goes on without a state", [8, 12], [-1, -1], [3, 0]),
        ("something else than the text", [8, 12], [-1, 2], [3, 0]),
    ]
    for message, ends, reads, writes in wrong:
        states = StateRuns(ends=ints(ends), reads=ints(reads), writes=ints(writes))
        with pytest.raises(AssertionError, match=message):
            FakeRuntime(4, 4, num_states=4).execute(replace(right, states=states))
    two = _plan(token_ids=[1, 2, 1], query_lens=[2, 1], kv_lens=[2, 1], block_tables=[0, 1])
    with pytest.raises(AssertionError, match="two sequences"):
        FakeRuntime(4, 4, num_states=4).execute(
            replace(two, states=StateRuns(ends=ints([3]), reads=ints([-1]), writes=ints([0])))
        )


def _image_plan() -> StepPlan:
    """Four rows, the two in the middle of an image of three embeddings, whose span is two long."""
    scheduler = make()
    image = Image(key=bytes(32), num_embeddings=3, num_pixels=9, pixels=None)
    images = PromptImages(images=(image,), spans=(Span(1, 2, 0, 1),))
    request = replace(ask(0, [5, IMAGE_TOKEN, IMAGE_TOKEN, 6]), images=images)
    scheduler.add(bring_pixels(request, set()), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    return plan


def test_fake_runtime_notices_wrong_images() -> None:
    right = _image_plan()
    assert FakeRuntime(100, 4).execute(right).failed_slots.tolist() == []
    assert FakeRuntime(100, 4).execute(right, failing=(0,)).failed_slots.tolist() == [0]
    wrong = {
        "embeddings 2..3 of 3": {"firsts": [2]},
        "a token is taken": {"rows": [2], "ends": [4]},
        "outside of their span": {"ends": [2]},
        "spans disagree": {"lengths": [1]},
    }
    for message, changes in wrong.items():
        images = replace(right.images, **{name: ints(values) for name, values in changes.items()})
        with pytest.raises(AssertionError, match=message):
            FakeRuntime(100, 4).execute(replace(right, images=images))
    cut = replace(right, images=replace(right.images, ends=ints([4])))
    with pytest.raises(AssertionError, match="a span of 3 is cut"):
        FakeRuntime(100, 4, whole_spans=True).execute(cut)
    runtime = FakeRuntime(100, 4)
    runtime.execute(right)
    with pytest.raises(AssertionError, match="slot 0 is in use"):
        runtime.execute(right)
    with pytest.raises(KeyError):
        FakeRuntime(100, 4).execute(replace(right, encode=ImageJobs()))


def test_load_with_images_has_the_expected_figures() -> None:
    cost = CostModel(step_seconds=0.0, token_seconds=0.0, pair_seconds=0.0, pixel_seconds=0.001)
    load = Load(rate=0.001, requests=20, images=2, different_images=3, image_tokens=30, image_pixels=500)
    result = run_load(SchedulerConfig(), cost, load)
    assert (len(result.timings), result.stats.images_encoded) == (20, 3)
    seconds = sum(timing.first_token - timing.arrival for timing in result.timings)
    assert seconds == pytest.approx(3 * 0.5)
    assert "3 images encoded" in report(result)


def test_load_report_has_the_expected_figures() -> None:
    """Alone and with fixed costs, the times can be worked out by hand."""
    cost = CostModel(step_seconds=0.01, token_seconds=0.001, pair_seconds=0.0)
    load = Load(rate=0.001, requests=20, prompt_tokens=50, output_tokens=30)
    result = run_load(SchedulerConfig(), cost, load)
    assert (len(result.timings), result.refused, result.timed_out) == (20, 0, 0)
    for timing in result.timings:
        if timing.tokens > 1:
            assert (timing.end - timing.first_token) / (timing.tokens - 1) == pytest.approx(0.011)
    prompt_seconds = sum(timing.first_token - timing.arrival for timing in result.timings)
    assert prompt_seconds == pytest.approx(20 * 0.01 + 0.001 * result.stats.prompt_tokens)
    assert "time per later token, s       0.011    0.011    0.011" in report(result)


def test_overload_refuses_and_stays_bounded() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_queued_requests=8)
    result = run_load(config, CostModel(), Load(rate=100.0, requests=100, prompt_tokens=20, output_tokens=10))
    assert result.refused > 50
    assert len(result.timings) + result.refused == 100


def test_command_line_prints_a_table() -> None:
    command = [sys.executable, "-m", "scheduler.simulate", "--rate", "2", "--requests", "20", "--output-tokens", "8"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "p50" in result.stdout
    assert "finished 20, refused 0" in result.stdout


@pytest.mark.parametrize("speculative", [None, LOOKUP])
def test_cost_of_the_scheduler_is_measured(speculative: SpeculativeConfig | None) -> None:
    plan, commit = cost(3, 2, few_words(), speculative)
    assert 0 < plan < 1
    assert 0 < commit < 1
