"""Layers whose matrices stay in host memory, and the two buffers on the device through which a step computes with them.
Made while weights are loaded, called by `models/offloaded.py` around each such layer, engine process.

A layer's matrices are one piece of host memory, so that they are one copy, and views of a buffer to all that computes.
Buffers are taken in turn: when such a layer is done, the copy of the one after the next begins; at the end of a step
those of the first two for the next step.

Not yet run on a card. Who copies is an argument, so tests run all but the side stream and the pinned memory on CPU.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from model_runtime.memory.budget import PlanError
from model_runtime.memory.offload import BUFFERS, Offload, staged_bytes
from model_runtime.ops.registry import PackedWeight

HOST = torch.device("cpu")


class Copies(Protocol):
    """How a device gets what is in host memory. Buffers have numbers."""

    def start(self, buffer: int, target: Tensor, source: Tensor) -> None:
        """Copy into a buffer once all is done that the device was told so far."""
        ...

    def wait(self, buffer: int) -> None:
        """What the device is told from here on comes after the last copy into a buffer."""
        ...


class PlainCopies:
    """In the order of all other work."""

    def start(self, buffer: int, target: Tensor, source: Tensor) -> None:
        """As in `Copies`."""
        target.copy_(source)

    def wait(self, buffer: int) -> None:
        """Nothing to wait for."""


class StreamCopies:
    """Beside the computing, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = [torch.cuda.Event() for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]

    def start(self, buffer: int, target: Tensor, source: Tensor) -> None:
        """As in `Copies`; `source` is pinned."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._done[buffer].record(self._stream)

    def wait(self, buffer: int) -> None:
        """As in `Copies`."""
        torch.cuda.current_stream(self._device).wait_event(self._done[buffer])


class Staging:
    """The layers that are left on the host, by their place among these."""

    def __init__(self, offload: Offload, hosts: Sequence[Tensor], buffers: Sequence[Tensor], copies: Copies) -> None:
        """`hosts` are what is copied for each layer: bytes in host memory."""
        self.offload = offload
        """As it was planned."""
        self._hosts, self._buffers, self._copies = hosts, buffers, copies
        self._places = {layer: place for place, layer in enumerate(offload.layers)}
        self._held: list[int | None] = [None] * BUFFERS
        """The place of the layer that is in each buffer, or on its way there."""
        for place in range(BUFFERS):
            self._start(place)

    def __contains__(self, layer: int) -> bool:
        return layer in self._places

    def enter(self, layer: int) -> None:
        """A layer is computed next, or its matrices are read."""
        place = self._places[layer]
        if self._held[place % BUFFERS] != place:  # as after a step that failed
            self._start(place)
        self._copies.wait(place % BUFFERS)

    def leave(self, layer: int) -> None:
        """It has been, and its buffer is free for the layer that has it next."""
        place = self._places[layer]
        following = place + BUFFERS if place + BUFFERS < len(self._hosts) else place % BUFFERS
        if following != place:
            self._start(following)

    def _start(self, place: int) -> None:
        buffer, host = place % BUFFERS, self._hosts[place]
        self._held[buffer] = place
        self._copies.start(buffer, self._buffers[buffer][: len(host)], host)


def stage(
    matrices: dict[str, PackedWeight],
    layer_of: Mapping[str, int],
    offload: Offload,
    device: torch.device,
    copies: Copies,
) -> Staging:
    """Move matrices that are in ordinary host memory to where copies start from, and put views of the buffers in their
    place. `layer_of` names those of the layers that are left on the host. Raises PlanError where the host cannot pin
    as much; whatever is raised, no memory is kept but what is still in `matrices`."""
    names: dict[int, list[str]] = {layer: [] for layer in offload.layers}
    for name, layer in layer_of.items():
        names[layer].append(name)
    hosts: list[Tensor] = []
    buffers = [torch.empty(offload.buffer_bytes, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
    try:
        for place, own in enumerate(names.values()):
            hosts.append(_moved(matrices, own, buffers[place % BUFFERS]))
            if device.type == "cuda":
                _pin(hosts[place])
        return Staging(offload, hosts, buffers, copies)
    except BaseException:  # which holds these as long as it is handled
        hosts.clear()
        buffers.clear()
        raise


def _moved(matrices: dict[str, PackedWeight], names: Sequence[str], buffer: Tensor) -> Tensor:
    """The bytes of a layer, each matrix freed once it is there."""
    host = torch.empty(sum(staged_bytes(matrices[name].num_bytes) for name in names), dtype=torch.uint8)
    start = 0
    for name in names:
        data = matrices[name].data
        there = slice(start, start + data.nbytes)
        host[there].copy_(data.view(-1).view(torch.uint8))
        matrices[name] = replace(matrices[name], data=buffer[there].view(data.dtype).view(data.shape))
        start += staged_bytes(data.nbytes)
    return host


def _pin(host: Tensor) -> None:
    """Lock it in memory, so that it is copied while the device computes. torch's own pinned memory would be rounded up
    to a power of two."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    except RuntimeError as error:
        message = f"{host.nbytes} bytes of host memory cannot be pinned ({error}): set offload_weights to less"
        raise PlanError(message) from None
    weakref.finalize(host, runtime.cudaHostUnregister, host.data_ptr()).atexit = False
