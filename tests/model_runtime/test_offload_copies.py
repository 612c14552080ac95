"""What a card is told for layers in host memory, with a stand-in for CUDA: in which order, and what it is to lock."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from model_runtime import offload
from model_runtime.memory.budget import PlanError


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes by address that a machine with a card would have locked; it locks three pieces."""
    locked: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        if len(locked) == 3:
            return 2
        locked[address] = size
        return 0

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"error {code}")

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=locked.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return locked


def test_pinned_memory_is_unlocked_before_it_is_freed(pinned: dict[int, int]) -> None:
    hosts = [torch.empty(100, dtype=torch.uint8) for _ in range(4)]
    for host in hosts[:3]:
        offload._pin(host)
    assert pinned == {host.data_ptr(): 100 for host in hosts[:3]}
    with pytest.raises(PlanError, match=r"100 bytes of host memory cannot be pinned \(error 2\): set offload_weights"):
        offload._pin(hosts[3])
    hosts.clear()
    del host
    assert pinned == {}


class Told:
    """What streams and events were told, by name and in order."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.words.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: self.words.append(f"{name} waits for {event.name}"),
        )

    def event(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, record=lambda on: self.words.append(f"{on.name} records {name}"))

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        self.words.append(f"on {stream.name}")
        yield
        self.words.append(f"no longer on {stream.name}")


def test_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy comes after all that the device was told, and before what is told once somebody has waited for it."""
    told = Told()
    events = iter([told.event("first"), told.event("second")])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: told.stream("side"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: next(events))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: told.stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", told.on)
    copies = offload.StreamCopies(torch.device("cuda"))
    target = SimpleNamespace(copy_=lambda source, non_blocking: told.words.append(f"copy {source} {non_blocking}"))
    copies.start(1, target, "host")  # type: ignore[arg-type]
    copies.wait(1)
    begun = ["side waits for main", "on side", "copy host True", "side records second", "no longer on side"]
    assert told.words == [*begun, "main waits for second"]
