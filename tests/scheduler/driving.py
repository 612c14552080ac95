"""Shorthands for driving a scheduler by hand: small requests, hand-built results."""

from collections.abc import Sequence
from dataclasses import replace

from scheduler.config import SchedulerConfig
from scheduler.plan import RowLogprobs, StepPlan, StepResult, floats, ints
from scheduler.request import Request, SamplingParams, TokenEvent
from scheduler.scheduler import Scheduler

CONFIG = SchedulerConfig(
    max_num_seqs=8, max_num_batched_tokens=64, block_size=4, max_queued_requests=100, prefill_share=0.25
)
"""Prompts get 16 of 64 tokens while a stream runs."""


def make(num_blocks: int = 100, max_model_len: int = 1000, config: SchedulerConfig = CONFIG) -> Scheduler:
    return Scheduler(config, num_blocks=num_blocks, max_model_len=max_model_len)


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


def answer(plan: StepPlan, tokens: Sequence[int] | int = 7) -> StepResult:
    """A result: the given tokens, or the same one for every row; log-probability -1 and no alternatives."""
    num_rows, num_scored = len(plan.sample.rows), len(plan.score.rows)
    token_ids = [tokens] * num_rows if isinstance(tokens, int) else list(tokens)
    return StepResult(
        step_id=plan.step_id, token_ids=ints(token_ids), sampled=_logprobs(num_rows), scored=_logprobs(num_scored)
    )


def _logprobs(num_rows: int) -> RowLogprobs:
    return RowLogprobs(chosen=floats([-1.0] * num_rows), top_offsets=ints([0] * (num_rows + 1)))


def step(scheduler: Scheduler, tokens: Sequence[int] | int = 7, now: float = 0.0) -> StepPlan:
    """Plan, answer, commit; the plan. There must be one."""
    plan = scheduler.plan(now)
    assert plan is not None
    scheduler.check_invariants()
    scheduler.commit(answer(plan, tokens), now)
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


def with_config(**changes: int | float | bool) -> SchedulerConfig:
    """CONFIG with other values."""
    return replace(CONFIG, **changes)  # type: ignore[arg-type]
