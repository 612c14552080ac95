"""Ranks of several machines find each other, and machines that were started with other sizes are told."""

from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch.distributed import Store

from model_runtime.layout import Layout
from model_runtime.memory.budget import PlanError
from model_runtime.rendezvous import open_store
from tests.ports import free_port


def meet(*ranks: tuple[int, int, int], seconds: float = 20.0) -> "list[Future[Store]]":
    """Ranks, each a number, the size of its mesh and the ranks of its machine, that come at once."""
    rendezvous = f"tcp://127.0.0.1:{free_port()}"

    def one(rank: tuple[int, int, int]) -> Store:
        number, size, here = rank
        return open_store(rendezvous, Layout(rank=number, tensor_size=size), here, seconds)

    with ThreadPoolExecutor() as pool:
        return [pool.submit(one, rank) for rank in ranks]


def test_all_come() -> None:
    first, second, third = (future.result() for future in meet((0, 3, 1), (1, 3, 1), (2, 3, 1)))
    first.set("a", "b")
    assert second.get("a") == third.get("a") == b"b"


@pytest.mark.parametrize("other", [(2, 4, 2), (1, 2, 2), (1, 3, 1)])
def test_a_machine_with_other_sizes_is_refused_on_both(other: tuple[int, int, int]) -> None:
    number, size, here = other
    words = (
        f"rank {number} was started with tensor_parallel_size {size}, nnodes {size // here}, "
        "machine 0 with tensor_parallel_size 2, nnodes 2: start serve with the same on all"
    )
    for future in meet((0, 2, 1), other):
        with pytest.raises(PlanError, match=words):
            future.result()


def test_who_does_not_come_is_named() -> None:
    (alone,) = meet((0, 3, 1), seconds=0.2)
    with pytest.raises(TimeoutError, match="of 3 ranks these did not come within 0 s: 1, 2"):
        alone.result()
