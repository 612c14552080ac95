"""Which tokens may follow: what the scheduler asks of whoever knows the grammars of outputs.

Implemented by `server/grammar/matchers.py`, used by `sampling_rows.py`; engine process.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class MaskRow(NamedTuple):
    """One row: what may follow `tokens`, the first `num_prompt` of which are the prompt, and then `drafts`, both int32.
    Drafts may be taken back, the output only grows."""

    seq_id: int
    tokens: "array[int]"
    num_prompt: int
    drafts: "array[int]"


class TokenMasks(Protocol):
    """Knows the grammars of live sequences, by seq_id."""

    def next_tokens(self, rows: Sequence[MaskRow]) -> "array[int]":
        """ceil(V / 32) int32 words a row: bit t % 32 of word t // 32 says that token t may follow. All zero: nothing
        may. A function of outputs and drafts alone; the rows of a sequence stand in order, with ever more drafts."""
        ...
