"""Steps of a layer for multi-token prediction: a row at a position takes the token behind it, its output stands in for
a state, and what went on from such output is computed again.
"""

from scheduler.config import SpeculativeConfig
from scheduler.plan import StepPlan
from scheduler.scheduler import Scheduler
from tests.scheduler.driving import ask, make, step, with_config

CONFIG = with_config(speculative_config=SpeculativeConfig(method="mtp", num_speculative_tokens=2))


def drafts(scheduler: Scheduler, token: int) -> tuple[StepPlan, tuple[list[int], ...]]:
    """A step that drafts this token: (the plan, its tokens, lengths and sampled rows)."""
    plan = step(scheduler, [token])
    assert plan.by_draft_model
    return plan, tuple(map(list, (plan.token_ids, plan.query_lens, plan.kv_lens, plan.sample.rows)))


def slot(plan: StepPlan, position: int) -> int:
    """Of the only sequence, whose blocks follow each other in the pool, as long as nothing was given back."""
    return plan.block_tables[0] * CONFIG.block_size + position


def test_rows_of_two_rounds() -> None:
    scheduler = make(config=CONFIG)
    scheduler.add(ask(0, [5, 6, 7]), 0.0)
    step(scheduler, [8])
    first, rows = drafts(scheduler, 9)
    assert rows == ([6, 7, 8], [3], [3], [2])
    assert list(first.normed_slots) == [slot(first, 3)]
    second, rows = drafts(scheduler, 10)
    assert rows == ([9], [1], [4], [0])
    assert list(second.block_tables) == list(first.block_tables)
    verifying = step(scheduler, [9, 10, 11])
    assert list(verifying.token_ids) == [8, 9, 10]
    assert not verifying.by_draft_model and not verifying.normed_slots
    assert list(second.normed_slots) == [verifying.block_tables[1] * CONFIG.block_size]
    _, rows = drafts(scheduler, 12)
    assert rows == ([9, 10, 11], [3], [6], [2]), "two of these rows went on from the layer's own output before"


def test_text_of_one_token_has_no_state() -> None:
    scheduler = make(config=CONFIG)
    scheduler.add(ask(0, [5]), 0.0)
    assert not step(scheduler, [6]).by_draft_model
    assert drafts(scheduler, 7)[1] == ([6], [1], [1], [0])
