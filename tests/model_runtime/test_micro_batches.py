"""A step's batch in parts: put together they are the batch, and each says of its rows what the batch says."""

import random
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch

from model_runtime.batch import Batch, ImageRows, make_batch
from model_runtime.micro_batches import num_parts, parts
from scheduler.plan import NO_STATE, ImageSpans, SampleRows, ScoreRows, StateRuns, StepPlan, ints

BLOCK = 4


def make_plan(random_: random.Random, num_sequences: int, images: ImageSpans) -> StepPlan:
    query_lens = [random_.choice([1, 1, random_.randint(1, 40)]) for _ in range(num_sequences)]
    kv_lens = [length + random_.randint(0, 30) for length in query_lens]
    total = sum(query_lens)
    return StepPlan(
        step_id=1,
        token_ids=ints([random_.randrange(100) for _ in range(total)]),
        query_lens=ints(query_lens),
        kv_lens=ints(kv_lens),
        block_tables=ints([random_.randrange(50) for length in kv_lens for _ in range(-(-length // BLOCK))]),
        sample=SampleRows(),
        score=ScoreRows(),
        rope_positions=ints(list(range(3 * total))),
        images=images,
        adapted=ints([0, *range(2, num_sequences, 2)]),
    )


def rows(batch: Batch) -> list[list[object]]:
    """Of each row: token, position, slot, rotations, the last key that it sees, its sequence's table so far, and
    whether an adapter changes it."""
    assert batch.adapted_A is not None
    adapted = set(batch.adapted_A.tolist())
    starts, tables = batch.query_starts_S1.tolist(), batch.table_starts_S1.tolist()
    found: list[list[object]] = []
    assert batch.rope_positions_T3 is not None and starts[0] == 0 and starts[-1] == batch.num_tokens
    for sequence, (start, end) in enumerate(pairwise(starts)):
        assert batch.positions_T[end - 1] + 1 == batch.kv_lens_S[sequence]
        for row in range(start, end):
            position = int(batch.positions_T[row])
            table = batch.block_tables[tables[sequence] : tables[sequence + 1]].tolist()[: position // BLOCK + 1]
            others = (int(x[row]) for x in (batch.token_ids_T, batch.slots_T, batch.rope_rows_T))
            found.append([*others, batch.rope_positions_T3[row].tolist(), position, table, row in adapted])
    return found


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_the_batch(seed: int) -> None:
    random_ = random.Random(seed)
    batch = make_batch(make_plan(random_, random_.randint(1, 8), ImageSpans()), BLOCK)
    found = parts(batch, random_.randint(2, 6))
    assert [row for part in found for row in rows(part)] == rows(batch)
    sizes = [part.num_tokens for part in found]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("seed", range(10))
def test_runs_that_are_cut_go_on_where_they_stopped(seed: int) -> None:
    """Walked through part by part, each row follows the state that it follows in the whole batch."""
    random_ = random.Random(seed)
    plan = make_plan(random_, random_.randint(1, 8), ImageSpans())
    cuts = {random_.randrange(1, len(plan.token_ids) + 1) for _ in range(3)}
    ends = sorted({*accumulate(plan.query_lens), *cuts})
    reads = [random_.choice((NO_STATE, 100 + index)) for index in range(len(ends))]
    states = StateRuns(ends=ints(ends), reads=ints(reads), writes=ints(list(range(len(ends)))))
    batch = make_batch(replace(plan, states=states), BLOCK)

    def walked(batches: list[Batch]) -> list[tuple[object, ...]]:
        """What each row follows: a slot as it was before the step, or the row before it."""
        found: list[tuple[object, ...]] = []
        left: dict[int, int] = {}
        for part in batches:
            assert part.runs is not None and part.runs.starts_G1[-1] == part.num_tokens
            starts = part.runs.starts_G1.tolist()
            for start, end, read, write in zip(
                starts, starts[1:], part.runs.reads_G.tolist(), part.runs.writes_G.tolist(), strict=False
            ):
                first = len(found)
                found += [("row", left[read]) if read in left else ("slot", read)]
                found += [("row", row) for row in range(first, first + end - start - 1)]
                left[write] = len(found) - 1
        return [*found, *sorted(left.items())]

    assert walked(parts(batch, random_.randint(2, 6))) == walked([batch])


def test_parts_are_as_many_as_take_the_least_time() -> None:
    """Of all numbers, as far as the time is m + stages - 1 parts, each of which has a fixed share."""
    for num_stages in (2, 3, 8):
        for tokens in (1, 8, 16, 64, 512, 2048):
            times = {m: (m + num_stages - 1) * (8 + tokens / m) for m in range(1, tokens + 1)}
            assert times[min(tokens, num_parts(tokens, num_stages))] <= 1.03 * min(times.values())
    assert [num_parts(tokens, 2) for tokens in (1, 16, 64, 512)] == [1, 1, 3, 8]


def image_batch(*, bidirectional: bool) -> Batch:
    """60 rows, of which 20 .. 49 are an image's."""
    spans = ImageSpans(
        rows=ints([20]), lengths=ints([30]), slots=ints([0]), firsts=ints([0]), starts=ints([20]), ends=ints([50])
    )
    plan = StepPlan(
        step_id=1,
        token_ids=ints(list(range(60))),
        query_lens=ints([60]),
        kv_lens=ints([60]),
        block_tables=ints(list(range(15))),
        sample=SampleRows(),
        score=ScoreRows(),
        images=spans,
    )
    numbers_NC = torch.arange(60.0).view(30, 2)
    images = ImageRows(start=20, embeddings_NC=numbers_NC, deepstack_NC=(numbers_NC + 100,))
    return make_batch(plan, BLOCK, (images,), bidirectional=bidirectional)


def test_images_that_attend_in_both_directions_are_not_cut() -> None:
    found = parts(image_batch(bidirectional=True), 3)
    assert [part.num_tokens for part in found] == [15, 35, 10]
    whole = found[1].images[0]
    assert whole.start == 5 and len(whole.embeddings_NC) == 30
    assert found[1].visible_ends_T is not None and found[1].visible_ends_T.tolist()[4:7] == [20, 50, 50]


def test_embeddings_go_with_their_rows() -> None:
    batch = image_batch(bidirectional=False)
    x_T2, deep_T2 = torch.zeros(60, 2), torch.zeros(60, 2)
    start = 0
    for part in parts(batch, 3):
        for images in part.images:
            where = slice(start + images.start, start + images.start + len(images.embeddings_NC))
            x_T2[where] += images.embeddings_NC
            deep_T2[where] += images.deepstack_NC[0]
        start += part.num_tokens
    assert torch.equal(x_T2[20:50], batch.images[0].embeddings_NC)
    assert torch.equal(deep_T2[20:50], batch.images[0].deepstack_NC[0])
    assert not x_T2[:20].any() and not x_T2[50:].any()
