"""Positions of M-RoPE in a plan: of prompts, of outputs, of outputs that are computed again."""

from scheduler.scheduler import Scheduler
from tests.scheduler.driving import ask, make, picture, run, show, sizes, step, with_config


def test_positions_of_m_rope_are_filled_for_every_token_of_the_step() -> None:
    scheduler = make()
    scheduler.add(ask(0, 3), 0.0)
    assert step(scheduler).rope_positions.tolist() == []
    request = show(1, [10, picture("A", 4), 11], rope=True, max_tokens=9)
    assert request.images.rope_delta == -2
    scheduler.add(request, 0.0)
    prompt = [(0, 0, 0), (1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (3, 3, 3)]
    assert _triples(scheduler) == [(3, 3, 3), *prompt]
    assert [_triples(scheduler) for _ in range(2)] == [[(4, 4, 4), (4, 4, 4)], [(5, 5, 5), (5, 5, 5)]]
    scheduler.abort(1)
    assert _triples(scheduler) == []


def _triples(scheduler: Scheduler) -> list[tuple[int, ...]]:
    return list(zip(*[iter(step(scheduler).rope_positions)] * 3, strict=True))


def test_recomputed_outputs_have_the_positions_that_they_had() -> None:
    config = with_config(max_num_seqs=2, enable_prefix_caching=False)
    scheduler = make(num_blocks=5, config=config)
    scheduler.add(ask(0, 7, max_tokens=6), 0.0)
    scheduler.add(show(1, [10, picture("A", 4), 11], rope=True, max_tokens=9), 0.0)
    plans = run(scheduler)[0]
    assert scheduler.stats().preemptions == 1
    (again,) = [plan for plan in plans[1:] if max(sizes(plan)) > 6]
    num_again = sizes(again)[-1]
    expected = [(0, 0, 0), (1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (3, 3, 3)]
    expected += [(position - 2,) * 3 for position in range(6, num_again)]
    triples = list(zip(*[iter(again.rope_positions)] * 3, strict=True))
    assert triples[-num_again:] == expected
