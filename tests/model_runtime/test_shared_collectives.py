"""Collectives in shared memory: the same as over gloo, in pieces too; a rank that is lost wakes the others."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
import torch

from model_runtime.kernels.build import build
from model_runtime.layout import DIMENSIONS, Layout
from model_runtime.shared_collectives import SharedMemoryCollectives, share_memory
from model_runtime.shared_memory import LINK_SLOTS, SLOT_BYTES, make_region, region_bytes
from tests.model_runtime.ranks import on_shared_memory
from tests.model_runtime.test_parallel import assert_exchanged, exchanged, numbers, passed_round

SLOT_FLOATS = SLOT_BYTES // 4


@pytest.mark.parametrize("count", [1, 1023, SLOT_FLOATS, SLOT_FLOATS + 1, 3 * SLOT_FLOATS + 77])
@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_has_the_order_of_ranks_on_every_rank(size: int, count: int) -> None:
    parts = [numbers(rank, count) for rank in range(size)]

    def one(collectives: SharedMemoryCollectives) -> torch.Tensor:
        x = parts[collectives.rank].clone()
        collectives.all_reduce(x)
        return x

    for x in on_shared_memory(size, one):
        assert torch.equal(x, reduce(torch.add, parts))


def step(kind: str, collectives: SharedMemoryCollectives, seed: int) -> bool:
    """Whether a collective of that kind gave what it must."""
    random_ = random.Random(seed)
    length, size, source = random_.choice([0, 1, 33, SLOT_FLOATS + 5]), collectives.size, random_.randrange(2)
    parts = [numbers(100 * seed + rank, length + (rank if kind == "gather" else 0)) for rank in range(size)]
    x = parts[collectives.rank].clone()
    if kind == "all_reduce":
        collectives.all_reduce(x)
        return torch.equal(x, reduce(torch.add, parts))
    if kind == "broadcast":
        collectives.broadcast(x, source)
        return torch.equal(x, parts[source])
    if kind == "all_gather":
        return all(map(torch.equal, collectives.all_gather(x), parts))
    gathered = collectives.gather(x, [len(part) for part in parts])
    return gathered is None if collectives.rank else all(map(torch.equal, gathered or [], parts))


@pytest.mark.parametrize("size", [2, 3])
def test_kinds_and_sizes_in_any_order(size: int) -> None:
    random_ = random.Random(size)
    kinds = [random_.choice(["all_reduce", "broadcast", "all_gather", "gather"]) for _ in range(200)]

    def one(collectives: SharedMemoryCollectives) -> list[bool]:
        return [step(kind, collectives, seed) for seed, kind in enumerate(kinds)]

    assert on_shared_memory(size, one) == [[True] * len(kinds)] * size


def test_things_go_round_from_each_rank_to_the_next() -> None:
    assert on_shared_memory(3, passed_round) == [[True] * 5] * 3


def test_the_slots_of_a_link_are_taken_again() -> None:
    """More than they hold, in order, while collectives go on beside it."""
    count = 5 * LINK_SLOTS

    def one(collectives: SharedMemoryCollectives) -> list[bool]:
        found = []
        for index in range(count):
            x = numbers(index, 5)
            if collectives.rank == 0:
                collectives.send(x)
            else:
                collectives.receive(taken := torch.empty(5))
                found.append(torch.equal(taken, x))
            if index % 7 == 0:
                collectives.all_reduce(total := torch.ones(3))
                found.append(total.tolist() == [2.0] * 3)
        return found

    first, last = on_shared_memory(2, one)
    assert all(first) and all(last) and len(last) == count + 6


def test_who_sends_goes_on_until_the_slots_are_full() -> None:
    descriptor = make_region(2)
    collectives = SharedMemoryCollectives(descriptor, 0, 2, 0.2)
    os.close(descriptor)
    for _ in range(LINK_SLOTS):
        collectives.send(torch.zeros(3))
    with pytest.raises(AssertionError, match="rank 1 ended or did not come"):
        collectives.send(torch.zeros(3))
    with pytest.raises(AssertionError, match="rank 1 ended or did not come"):
        collectives.receive(torch.zeros(3))
    assert collectives.counters.sent_bytes == LINK_SLOTS * 12
    assert 0.4 <= collectives.counters.seconds < 5


def test_rows_of_other_types_and_shapes_gather() -> None:
    def one(collectives: SharedMemoryCollectives) -> list[torch.Tensor] | None:
        x = torch.full((collectives.rank, 2, 3), collectives.rank, dtype=torch.bfloat16)
        return collectives.gather(x, [0, 1, 2])

    first, *_ = on_shared_memory(3, one)
    assert first is not None
    assert [part.shape for part in first] == [(0, 2, 3), (1, 2, 3), (2, 2, 3)]
    assert first[2].dtype == torch.bfloat16 and bool((first[2] == 2).all())


def test_rows_of_uneven_parts_come_to_all_or_to_whom_they_are_for() -> None:
    assert_exchanged(on_shared_memory(3, exchanged))


def test_rows_in_many_pieces_come_to_whom_they_are_for() -> None:
    width, counts = SLOT_FLOATS // 3, [[4, 5], [3, 1]]

    def one(collectives: SharedMemoryCollectives) -> torch.Tensor:
        return collectives.all_to_all(numbers(collectives.rank, sum(counts[collectives.rank]), width), counts)

    parts = [numbers(rank, sum(counts[rank]), width) for rank in range(2)]
    first, second = on_shared_memory(2, one)
    assert torch.equal(first, torch.cat([parts[0][:4], parts[1][:3]]))
    assert torch.equal(second, torch.cat([parts[0][4:], parts[1][3:]]))


def test_time_and_bytes_are_counted() -> None:
    def one(collectives: SharedMemoryCollectives) -> SharedMemoryCollectives:
        if collectives.rank == 1:
            time.sleep(0.5)
        collectives.all_reduce(torch.zeros(64))
        return collectives

    waited, late = (collectives.counters for collectives in on_shared_memory(2, one))
    assert (waited.calls, waited.sent_bytes) == (late.calls, late.sent_bytes) == (1, 256)
    assert 0.4 < waited.waiting_seconds <= waited.seconds
    assert late.waiting_seconds < 0.4


def test_what_never_comes_is_an_error_after_the_time_out() -> None:
    descriptor = make_region(2)
    collectives = SharedMemoryCollectives(descriptor, 0, 2, 0.2)
    os.close(descriptor)
    began = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 ended or did not come to a collective in time"):
        collectives.all_reduce(torch.zeros(3))
    assert 0.2 <= time.monotonic() - began < 5


@contextmanager
def peer(timeout_seconds: float) -> Iterator[tuple[SharedMemoryCollectives, "subprocess.Popen[str]"]]:
    """Rank 0 here, rank 1 in a process of its own, which sums with this one."""
    descriptor = make_region(2)
    arguments = [str(build()), str(descriptor), str(region_bytes(2)), str(SLOT_BYTES)]
    script = str(Path(__file__).parent / "peer_rank.py")
    process = subprocess.Popen(
        [sys.executable, script, *arguments], pass_fds=[descriptor], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        yield SharedMemoryCollectives(descriptor, 0, 2, timeout_seconds), process
    finally:
        process.kill()
        process.communicate()
        os.close(descriptor)


def sums(collectives: SharedMemoryCollectives, until: Callable[[int], bool]) -> int:
    """How often it summed."""
    count = 0
    while not until(count):
        x = torch.ones(3)
        collectives.all_reduce(x)
        assert x.tolist() == [2.0, 3.0, 4.0]
        count += 1
    return count


def test_a_killed_rank_wakes_the_others_long_before_the_time_out() -> None:
    with peer(600.0) as (collectives, process):
        assert sums(collectives, lambda count: count == 1000) == 1000
        process.kill()  # nobody waits for it here: a zombie is dead too
        began = time.monotonic()
        with pytest.raises(AssertionError, match="rank 1 ended"):
            sums(collectives, lambda count: time.monotonic() > began + 10)
        assert time.monotonic() - began < 5


def test_a_stopped_rank_is_an_error_after_the_time_out() -> None:
    with peer(1.5) as (collectives, process):
        sums(collectives, lambda count: count == 10)
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(AssertionError, match="rank 1"):
            sums(collectives, lambda count: time.monotonic() > began + 30)
        assert 1.4 < time.monotonic() - began < 20


def test_every_group_of_a_mesh_has_an_area_of_its_own() -> None:
    layout = Layout(tensor_size=2, context_size=2, pipeline_size=2)
    descriptor = make_region(*map(len, layout.areas))

    def one(rank: int) -> list[list[int]]:
        mesh = share_memory(replace(layout, rank=rank), descriptor, 30.0)
        groups = [mesh.tensor, mesh.context, mesh.pipeline]
        return [[int(part) for part in group.all_gather(torch.tensor(rank))] for group in groups]

    with ThreadPoolExecutor(layout.size) as pool:
        met = list(pool.map(one, range(layout.size)))
    os.close(descriptor)
    assert met == [
        [next(group for group in layout.groups(dimension) if rank in group) for dimension in DIMENSIONS]
        for rank in range(layout.size)
    ]
