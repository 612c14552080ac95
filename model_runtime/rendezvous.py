"""Where the ranks of a process group of torch find each other. Used by `parallel.connect`; engine process and ranks.

Between machines rank 0 keeps a store, to which the others connect, and each says who it is before any relies on it:
`torch.distributed` alone would wait for a number of ranks until its time is over, and not say that machines disagree
about that number.
"""

import time
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import FileStore, Store, TCPStore

from model_runtime.layout import DIMENSIONS, Layout
from model_runtime.memory.budget import PlanError

POLL_SECONDS = 0.05


def open_store(rendezvous: str, layout: Layout, ranks_here: int, timeout_seconds: float) -> Store:
    """Of `rendezvous`, file:///PATH for ranks of one machine, or tcp://HOST:PORT. Raises PlanError, on rank 0 and on
    the rank, for one of a machine with other sizes; TimeoutError, or on other ranks RuntimeError, if not all come in
    time."""
    address = urlsplit(rendezvous)
    if address.scheme == "file":
        return FileStore(address.path, layout.size)
    assert address.scheme == "tcp" and address.hostname and address.port, f"{rendezvous} is no place to meet"
    store = TCPStore(
        address.hostname,
        address.port,
        is_master=layout.rank == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
    )
    sizes = [f"{name}_parallel_size {size}" for name, size in zip(DIMENSIONS, layout.sizes, strict=True) if size > 1]
    mesh = ", ".join([*sizes, f"nnodes {layout.size // ranks_here}"])
    if layout.rank == 0:
        store.set("mesh", mesh)
    elif (found := store.get("mesh").decode()) != mesh:
        refusal = (
            f"rank {layout.rank} was started with {mesh}, machine 0 with {found}: start serve with the same on all"
        )
        store.set("refusal", refusal)
        raise PlanError(refusal)
    store.set(_key(layout.rank), "")
    _wait(store, layout.size, timeout_seconds)
    return store


def _wait(store: TCPStore, size: int, timeout_seconds: float) -> None:
    """For all ranks to say who they are."""
    end = time.monotonic() + timeout_seconds
    while not store.check([_key(rank) for rank in range(size)]):
        if store.check(["refusal"]):
            raise PlanError(store.get("refusal").decode())
        if time.monotonic() > end:
            late = ", ".join(str(rank) for rank in range(size) if not store.check([_key(rank)]))
            raise TimeoutError(f"of {size} ranks these did not come within {timeout_seconds:.0f} s: {late}")
        time.sleep(POLL_SECONDS)


def _key(rank: int) -> str:
    return f"rank {rank}"
