"""Shorthands for driving a scheduler by hand: small requests, hand-built results."""

from collections.abc import Sequence
from dataclasses import replace

from scheduler.config import SchedulerConfig, SpeculativeConfig
from scheduler.encoder_cache import EncoderLimits
from scheduler.masks import TokenMasks
from scheduler.plan import RowLogprobs, StepPlan, StepResult, floats, ints
from scheduler.request import Request, SamplingParams, TokenEvent
from scheduler.scheduler import Scheduler
from scheduler.simulated_requests import Part, Picture, bring_pixels, lay_out
from scheduler.speculation import Drafter

CONFIG = SchedulerConfig(
    max_num_seqs=8, max_num_batched_tokens=64, block_size=4, max_queued_requests=100, prefill_share=0.25
)
"""Prompts get 16 of 64 tokens while a stream runs."""

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4)

ENCODER = EncoderLimits(cache_bytes=1000, bytes_per_embedding=10)
"""Room for 100 embeddings."""


def make(
    num_blocks: int = 100,
    max_model_len: int = 1000,
    config: SchedulerConfig = CONFIG,
    encoder: EncoderLimits = ENCODER,
    masks: TokenMasks | None = None,
    drafter: Drafter | None = None,
) -> Scheduler:
    return Scheduler(
        config, num_blocks=num_blocks, max_model_len=max_model_len, encoder=encoder, masks=masks, drafter=drafter
    )


def ask(
    seq_id: int,
    prompt: Sequence[int] | int = 5,
    *,
    priority: int = 0,
    deadline: float | None = None,
    cache_salt: bytes = b"",
    leader: int | None = None,
    max_tokens: int = 100,
    sampling: SamplingParams | None = None,
) -> Request:
    """A request; a prompt given as a number is so many tokens that no other sequence has."""
    tokens = range(1000 * seq_id, 1000 * seq_id + prompt) if isinstance(prompt, int) else prompt
    return Request(
        seq_id=seq_id,
        prompt_ids=ints(list(tokens)),
        sampling=sampling or SamplingParams(max_tokens=max_tokens),
        priority=priority,
        deadline=deadline,
        cache_salt=cache_salt,
        leader=leader,
    )


def picture(name: str, *runs: int) -> Picture:
    """An image of ten pixels for each embedding."""
    return Picture(name.encode() * 32, runs, 10 * sum(runs))


A, B, C, D = (picture(name, 8) for name in "ABCD")


def show(
    seq_id: int,
    parts: Sequence[Part],
    *,
    pixels: bool = True,
    rope: bool = False,
    priority: int = 0,
    max_tokens: int = 100,
) -> Request:
    """A request with pictures."""
    ids, images = lay_out(list(parts), rope=rope)
    request = replace(ask(seq_id, ids, priority=priority, max_tokens=max_tokens), images=images)
    return bring_pixels(request, set()) if pixels else request


def encoded(plan: StepPlan) -> str:
    """Names of the pictures that the plan encodes."""
    return "".join(chr(pixels.data[0]) for pixels in plan.encode.pixels)


def spans(plan: StepPlan) -> list[tuple[int, ...]]:
    """(row, length, slot, first embedding, start, end) of each span in the plan."""
    images = plan.images
    columns = (images.rows, images.lengths, images.slots, images.firsts, images.starts, images.ends)
    return list(zip(*columns, strict=True))


def answer(plan: StepPlan, tokens: Sequence[int] | int = 7, failed_slots: Sequence[int] = ()) -> StepResult:
    """A result: the given tokens, or the same one for every row; log-probability -1 and no alternatives."""
    num_rows, num_scored = len(plan.sample.rows), len(plan.score.rows)
    token_ids = [tokens] * num_rows if isinstance(tokens, int) else list(tokens)
    return StepResult(
        step_id=plan.step_id,
        token_ids=ints(token_ids),
        sampled=_logprobs(num_rows),
        scored=_logprobs(num_scored),
        failed_slots=ints(list(failed_slots)),
    )


def _logprobs(num_rows: int) -> RowLogprobs:
    return RowLogprobs(
        chosen=floats([-1.0] * num_rows), ranks=ints([1] * num_rows), top_offsets=ints([0] * (num_rows + 1))
    )


def step(
    scheduler: Scheduler, tokens: Sequence[int] | int = 7, now: float = 0.0, failed_slots: Sequence[int] = ()
) -> StepPlan:
    """Plan, answer, commit; the plan. There must be one."""
    plan = scheduler.plan(now)
    assert plan is not None
    scheduler.check_invariants()
    scheduler.commit(answer(plan, tokens, failed_slots), now)
    scheduler.check_invariants()
    return plan


def run(scheduler: Scheduler, max_steps: int = 2000) -> tuple[list[StepPlan], list[TokenEvent]]:
    """Step until nothing is left; all plans and all events."""
    plans: list[StepPlan] = []
    events = scheduler.take_events()
    while scheduler.has_work():
        assert len(plans) < max_steps, "it does not end"
        plans.append(step(scheduler))
        events += scheduler.take_events()
    return plans, events


def sizes(plan: StepPlan) -> list[int]:
    """Tokens of each sequence in the plan."""
    return plan.query_lens.tolist()


def outputs(events: list[TokenEvent]) -> dict[int, list[int]]:
    """Tokens by sequence."""
    tokens: dict[int, list[int]] = {}
    for event in events:
        tokens.setdefault(event.seq_id, []).extend(event.token_ids)
    return tokens


def with_config(**changes: int | float | bool | SpeculativeConfig) -> SchedulerConfig:
    """CONFIG with other values."""
    return replace(CONFIG, **changes)  # type: ignore[arg-type]
