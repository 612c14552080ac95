"""Which layers are left in host memory, and what that takes: arithmetic."""

import pytest

from model_runtime.config import RuntimeConfig
from model_runtime.memory.budget import PlanError
from model_runtime.memory.offload import LayerBytes, planned_offload, ways


def layers_of(*sizes: int) -> dict[int, LayerBytes]:
    return {layer: LayerBytes(size - 1, size) for layer, size in enumerate(sizes)}


def test_layers_are_spread_evenly() -> None:
    found = list(ways(layers_of(*[100] * 8)))
    assert [way.layers for way in found] == [
        (1, 4, 7),
        (1, 3, 5, 7),
        (0, 2, 3, 5, 7),
        (0, 1, 3, 4, 5, 7),
        (0, 1, 2, 3, 4, 5, 7),
        tuple(range(8)),
    ]
    three, four = found[:2]
    assert (three.taken_bytes, three.host_bytes, three.device_bytes, three.copied_bytes) == (297, 300, 200, 200)
    assert (four.host_bytes, four.saved_bytes, four.copied_bytes) == (400, 196, 400)


def test_as_many_layers_as_are_asked_for() -> None:
    layers = layers_of(*[100] * 8)
    asked = {size: planned_offload(layers, RuntimeConfig(offload_weights=size)) for size in (0, 1, 300, 301, 800)}
    assert [None if way is None else len(way.layers) for way in asked.values()] == [None, 3, 3, 4, 8]
    with pytest.raises(PlanError, match=r"offload_weights 801: .* set it to at most 800, which is all layers"):
        planned_offload(layers, RuntimeConfig(offload_weights=801))
    for few in (layers_of(100, 100), layers_of(1, 300, 300, 1)):
        with pytest.raises(PlanError, match="cannot be left in host memory; leave it out for this model"):
            planned_offload(few, RuntimeConfig(offload_weights=1))


def test_buffers_are_as_large_as_the_largest_layer() -> None:
    """The first layers of a mixture are dense and small."""
    (first, *_, last) = ways(layers_of(10, 100, 100, 100, 100))
    assert (first.layers, first.buffer_bytes, first.saved_bytes) == ((0, 2, 4), 100, 9 + 2 * 99 - 200)
    assert (last.host_bytes, last.buffer_bytes) == (410, 100)
