"""How the matrices of a checkpoint are stored, as data. Made by `hf/quantization.py`, read by the loaders in
`weights/`; does not import torch.
"""

import re
from dataclasses import dataclass
from typing import Literal

Layout = Literal["fp8", "int8", "packed", "mxfp4", "awq", "gptq"]
"""How a module's tensors are called and laid out; see `weights/scaled.py` and `weights/integers.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixScheme:
    """How a matrix [N, K] is stored."""

    layout: Layout
    bits: int
    block: tuple[int, int]
    """Neighbouring rows and columns that share a scale; 0: all of them."""
    symmetric: bool = True
    """Integers have no zero points."""
    zero_offset: int = 0
    """What has to be added to a stored zero point."""
    any_order: bool = False
    """Columns that share a scale may stand anywhere in a row."""

    def num_groups(self, num_columns: int) -> int:
        """Scales of a row."""
        return -(-num_columns // self.block[1]) if self.block[1] else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Of a checkpoint."""

    groups: tuple[tuple[tuple[str, ...], MatrixScheme], ...]
    """(names of modules, how they are stored); names as compressed-tensors has them: of a module, of the last part of
    it, `re:` and a pattern of its beginning, or the class Linear."""
    ignored: tuple[str, ...] = ()
    """Such names of modules whose matrices are floats."""

    def of(self, *spellings: str) -> MatrixScheme | None:
        """How a module is stored that is not ignored; any of its names may be meant."""
        if any(_names(name, module) for name in self.ignored for module in spellings):
            return None
        exact = [
            scheme
            for names, scheme in self.groups
            if any(_names(name, module) for name in names for module in spellings)
        ]
        every = [scheme for names, scheme in self.groups if "Linear" in names]
        return (*exact, *every, None)[0]


def _names(name: str, module: str) -> bool:
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), module) is not None
    return module == name or module.endswith(f".{name}") or module.startswith(f"{name}.")
