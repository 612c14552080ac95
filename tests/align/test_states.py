"""Layers with states as `align` sees them: all that goes into their recurrences and comes out, by one rank and by two;
and what is wrong in them, by layer."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from model_runtime.architecture import ModelConfig
from tests.align.cases import Aligned

FLIPS: dict[str, dict[str, object]] = {
    "kimi_linear": {"decay_bound": -5.0},
    "qwen3_next": {"gate": "sigmoid"},
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", FLIPS)
def test_nothing_flipped(checkpoint: Callable[[str], Aligned], family: str, ranks: int) -> None:
    found = checkpoint(family).compared(ranks=ranks)
    assert found.passed
    assert ranks > 1 or found.unobserved == ()  # of two, summands are seen when they are summed


@pytest.mark.parametrize("family", FLIPS)
def test_what_a_state_makes_is_compared_where_it_is_projected(
    checkpoint: Callable[[str], Aligned], family: str
) -> None:
    first: list[int] = []

    def flip(config: ModelConfig) -> ModelConfig:
        assert config.delta is not None
        first.append(config.delta.layers.index(True))
        return replace(config, delta=replace(config.delta, **FLIPS[family]))  # type: ignore[arg-type]

    found = checkpoint(family).compared(flip)
    assert not found.passed and found.first is not None
    assert (found.first.layer, found.first.kind) == (first[0], "attention")
