"""Ranks together: sums in the order of ranks on every rank, gathers of uneven parts, broadcasts, places in the mesh."""

import json
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
import torch

from model_runtime.layout import Layout
from model_runtime.parallel import Alone, Collectives
from tests.model_runtime.ranks import in_processes, on_threads


def numbers(rank: int, *shape: int) -> torch.Tensor:
    """Of magnitudes that make the order of a sum show."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator) * 10 ** torch.randint(-4, 5, shape, generator=generator)


def test_ranks_count_along_the_tensor_dimension_first() -> None:
    layout = Layout(tensor_size=2, context_size=1, pipeline_size=3)
    places = [replace(layout, rank=rank).place for rank in range(6)]
    assert places == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 0, 2), (1, 0, 2)]
    assert layout.groups("tensor") == [[0, 1], [2, 3], [4, 5]]
    assert layout.groups("pipeline") == [[0, 2, 4], [1, 3, 5]]
    assert layout.areas == [[0, 1], [2, 3], [4, 5], [0, 2, 4], [1, 3, 5]]
    with pytest.raises(ValueError, match=r"rank must be within 0\.\.5"):
        Layout(rank=6, tensor_size=2, pipeline_size=3)
    with pytest.raises(ValueError, match="at least 1"):
        Layout(tensor_size=0)


def test_a_sum_has_the_order_of_ranks_on_every_rank() -> None:
    parts = [numbers(rank, 5, 33) for rank in range(3)]
    in_order = reduce(torch.add, parts)
    assert not torch.equal(in_order, reduce(torch.add, reversed(parts))), "the order must matter here"

    def one(collectives: Collectives) -> torch.Tensor:
        x = parts[collectives.rank].clone()
        collectives.all_reduce(x)
        return x

    for x in on_threads(3, one):
        assert torch.equal(x, in_order)


def test_uneven_parts_gather_on_rank_0() -> None:
    def one(collectives: Collectives) -> list[torch.Tensor] | None:
        return collectives.gather(numbers(collectives.rank, 2 + collectives.rank, 3), [2, 3, 4])

    first, *others = on_threads(3, one)
    assert first is not None and others == [None, None]
    assert all(torch.equal(part, numbers(rank, 2 + rank, 3)) for rank, part in enumerate(first))


def test_everybody_has_all_parts_and_what_the_source_had() -> None:
    def one(collectives: Collectives) -> tuple[list[torch.Tensor], torch.Tensor]:
        x = numbers(collectives.rank, 4)
        parts = collectives.all_gather(x)
        collectives.broadcast(x, 1)
        return parts, x

    for parts, x in on_threads(2, one):
        assert torch.equal(torch.stack(parts), torch.stack([numbers(0, 4), numbers(1, 4)]))
        assert torch.equal(x, numbers(1, 4))


def passed_round(collectives: Collectives) -> list[bool]:
    """Whether each thing came as it was sent; several, of different lengths, are on their way at once."""
    lengths = (1, 0, 65537, 77, 196608)
    for index, length in enumerate(lengths):
        collectives.send(numbers(100 * collectives.rank + index, length))
    found = []
    for index, length in enumerate(lengths):
        x = torch.empty(length)
        collectives.receive(x)
        found.append(torch.equal(x, numbers(100 * ((collectives.rank - 1) % collectives.size) + index, length)))
    collectives.all_gather(torch.zeros(1))  # who leaves breaks connections, also of what is still on its way
    return found


def test_things_go_round_from_each_rank_to_the_next() -> None:
    assert on_threads(3, passed_round) == [[True] * 5] * 3


COUNTS = [[2, 0, 1], [0, 0, 0], [3, 4, 0]]
"""Rows that each rank gives to each."""


def exchanged(collectives: Collectives) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of all ranks, and the rows for this rank."""
    counts = [sum(row) for row in COUNTS]
    x = numbers(collectives.rank, counts[collectives.rank], 2, 3)
    return collectives.gather_rows(x, counts), collectives.all_to_all(x, COUNTS)


def assert_exchanged(found: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    parts = [numbers(rank, sum(row), 2, 3) for rank, row in enumerate(COUNTS)]
    for rank, (everything, own) in enumerate(found):
        assert torch.equal(everything, torch.cat(parts))
        mine = [part[sum(row[:rank]) :][: row[rank]] for part, row in zip(parts, COUNTS, strict=True)]
        assert torch.equal(own, torch.cat(mine))


def test_rows_of_uneven_parts_come_to_all_or_to_whom_they_are_for() -> None:
    assert_exchanged(on_threads(3, exchanged))


def test_what_was_sent_is_counted() -> None:
    def one(collectives: Collectives) -> tuple[int, int]:
        collectives.all_reduce(numbers(0, 8, 4))
        collectives.broadcast(numbers(0, 2), 1)
        return collectives.counters.calls, collectives.counters.sent_bytes

    assert on_threads(2, one) == [(2, 128), (2, 136)]


def test_alone_nothing_changes() -> None:
    x, alone = numbers(0, 3), Alone()
    alone.all_reduce(x)
    alone.broadcast(x, 0)
    (part,), (other,) = alone.gather(x, [3]) or [], alone.all_gather(x)
    assert torch.equal(x, numbers(0, 3)) and part is x and other is x
    assert alone.gather_rows(x, [3]) is x and alone.all_to_all(x, [[3]]) is x


def test_processes_meet_at_a_file(tmp_path: Path) -> None:
    outputs = in_processes("tests.model_runtime.rank_sums", 2, [str(tmp_path / "meet")])
    assert [json.loads(line) for line in outputs] == [[0, [11.0, 22.0]], [1, [11.0, 22.0]]]
