"""Checkpoints that several files of these tests ask for."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.align.cases import Aligned, make_aligned


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Aligned]:
    """Of a family of text models, made when it is first asked for."""
    return cache(lambda family: make_aligned(tmp_path_factory.mktemp(family), family, 0))
