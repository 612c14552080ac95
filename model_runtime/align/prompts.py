"""The inputs that product and reference are both given, and how the product computes them: ragged batches over a paged
cache, prompts in chunks beside each other, their last tokens one by one. Process of `firstlight align`.

Legend: T tokens of a step, L tokens of all prompts.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from scheduler.plan import NO_STATE, SampleRows, ScoreRows, StateRuns, StepPlan, ints

LENGTHS = (41, 19, 30)
"""Tokens of the prompts unless a window wants longer ones."""
LONGEST = 1024
"""That a window may make of the first one: the reference holds all scores of a layer at once."""
CHUNK = 7
DECODED = 3
"""Tokens at the end of each prompt that are computed one by one."""

Prompts = tuple[tuple[int, ...], ...]


def lengths_for(windows: Sequence[int], max_position: int) -> tuple[int, ...]:
    """Of the prompts: the first is longer than every window up to LONGEST."""
    beyond = max((window for window in windows if window < LONGEST), default=0) + 9
    return tuple(min(length, max_position) for length in (max(LENGTHS[0], beyond), *LENGTHS[1:]))


def seeded_prompts(lengths: Sequence[int], vocab_size: int) -> Prompts:
    """Tokens of no meaning, the same at every call."""
    draw = random.Random(0)
    return tuple(tuple(draw.randrange(vocab_size) for _ in range(length)) for length in lengths)


def cut_prompts(text: Sequence[int], lengths: Sequence[int]) -> Prompts:
    """One piece of a text after the other."""
    ends = list(accumulate(lengths))
    return tuple(tuple(text[end - length : end]) for length, end in zip(lengths, ends, strict=True))


@dataclass(frozen=True, slots=True)
class Step:
    """A plan, and the rows of all prompts together that its tokens are."""

    plan: StepPlan
    rows_T: Tensor


def num_blocks(prompts: Prompts, block_size: int) -> int:
    """That the prompts take."""
    return sum(-(-len(prompt) // block_size) for prompt in prompts)


def steps(prompts: Prompts, block_size: int, chunk: int = CHUNK, whole: int = 0) -> Iterator[Step]:
    """All prompts side by side until each is computed, in blocks that lie in random order. The first chunk of the first
    one has at least `whole` tokens."""
    free = list(range(num_blocks(prompts, block_size)))
    random.Random(0).shuffle(free)
    tables = [[free.pop() for _ in range(-(-len(prompt) // block_size))] for prompt in prompts]
    starts = [sum(map(len, prompts[:index])) for index in range(len(prompts))]
    done = [0] * len(prompts)
    while any(count < len(prompt) for count, prompt in zip(done, prompts, strict=True)):
        parts = {}
        for index, prompt in enumerate(prompts):
            left = len(prompt) - done[index]
            if left:
                longest = max(chunk, whole) if index == 0 and not done[0] else chunk
                parts[index] = slice(done[index], done[index] + (min(longest, left - DECODED) if left > DECODED else 1))
                done[index] = parts[index].stop
        yield _step(prompts, parts, tables, starts, block_size)


def _step(
    prompts: Prompts, parts: dict[int, slice], tables: list[list[int]], starts: list[int], block_size: int
) -> Step:
    plan = StepPlan(
        step_id=0,
        token_ids=ints([token for index, part in parts.items() for token in prompts[index][part]]),
        query_lens=ints([part.stop - part.start for part in parts.values()]),
        kv_lens=ints([part.stop for part in parts.values()]),
        block_tables=ints(
            [block for index, part in parts.items() for block in tables[index][: -(-part.stop // block_size)]]
        ),
        sample=SampleRows(),
        score=ScoreRows(),
        states=StateRuns(
            ends=ints([*accumulate(part.stop - part.start for part in parts.values())]),
            reads=ints([index if part.start else NO_STATE for index, part in parts.items()]),
            writes=ints(list(parts)),
        ),
    )
    rows = [starts[index] + position for index, part in parts.items() for position in range(part.start, part.stop)]
    return Step(plan, torch.tensor(rows))
