"""Which layers leave their matrices in host memory where a device is too small (`--offload-weights`), and what they
take on both sides. Called by `planning.py` before a model is loaded; `model_runtime/offload.py` does what is decided
here. Pure arithmetic.

Whole layers are left there, evenly spread: while one is copied, the layers between it and the one before are computed,
so copies have the whole step. At the end of the model each would have the time of one layer, and the link would rest
before. Of a mixture all experts of a layer are copied: which of them a step needs is known when the layer has begun.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from model_runtime.architecture import ModelConfig
from model_runtime.config import RuntimeConfig
from model_runtime.memory.budget import PlanError

BUFFERS = 2
"""On the device: while a layer computes from one, the next layer's matrices come to the other."""
ALIGNMENT = 256
"""Bytes. Each matrix begins at a multiple of it, as one that is allocated by itself."""


class LayerBytes(NamedTuple):
    """Of the matrices of a layer, in a rank."""

    taken: int
    """By all, each in a tensor of its own."""
    staged: int
    """By all in one buffer."""


def staged_bytes(num_bytes: int) -> int:
    """What a matrix takes of a buffer."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Of a rank."""

    layers: tuple[int, ...]
    """Numbers in the whole model, ascending."""
    taken_bytes: int
    """What their matrices would take on the device."""
    host_bytes: int
    """What they take on the host."""
    buffer_bytes: int
    """One of the two buffers: as large as the largest layer."""
    copied_bytes: int
    """In each step."""

    @property
    def device_bytes(self) -> int:
        """Of both buffers."""
        return BUFFERS * self.buffer_bytes

    @property
    def saved_bytes(self) -> int:
        """That the device has more room."""
        return self.taken_bytes - self.device_bytes


def ways(layers: Mapping[int, LayerBytes]) -> Iterator[Offload]:
    """To leave more and more layers on the host, as long as it saves something: two would take what the buffers do."""
    numbers = sorted(layers)
    for count in range(BUFFERS + 1, len(numbers) + 1):
        chosen = tuple(numbers[(place + 1) * len(numbers) // count - 1] for place in range(count))
        sizes = [layers[number] for number in chosen]
        host = sum(size.staged for size in sizes)
        way = Offload(
            layers=chosen,
            taken_bytes=sum(size.taken for size in sizes),
            host_bytes=host,
            buffer_bytes=max(size.staged for size in sizes),
            # of three the second has a buffer to itself, and stays there
            copied_bytes=host - sizes[1].staged if count == BUFFERS + 1 else host,
        )
        if way.saved_bytes > 0:
            yield way


def planned_offload(layers: Mapping[int, LayerBytes], runtime: RuntimeConfig) -> Offload | None:
    """The fewest layers that are as many bytes as configured; None where nothing is. Raises PlanError where there are
    not as many."""
    if not (wanted := runtime.offload_weights):
        return None
    most = 0
    for way in ways(layers):
        if way.host_bytes >= wanted:
            return way
        most = max(most, way.host_bytes)
    advice = f"set it to at most {most}, which is all layers" if most else "leave it out for this model"
    raise PlanError(f"offload_weights {wanted}: so many bytes of layers cannot be left in host memory; {advice}")


def refused_offload(config: ModelConfig, runtime: RuntimeConfig, device_type: str) -> str:
    """Why weights cannot be left on the host; empty where they can, or need not."""
    if not runtime.offload_weights:
        return ""
    if device_type == "cpu":
        return (
            "offload_weights is for devices with memory of their own, and that of the CPU is the host's: leave it out"
        )
    if config.depth_group:
        return "offload_weights is not supported for block attention residuals, whose layers are not run one by one"
    return ""
