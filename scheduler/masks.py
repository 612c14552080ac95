"""Which tokens may follow: what the scheduler asks of whoever knows the grammars of outputs.

Implemented by `server/grammar/matchers.py`, used by `sampling_rows.py`; engine process.
"""

from array import array
from typing import Protocol


class TokenMasks(Protocol):
    """Knows the grammars of live sequences, by seq_id."""

    def next_tokens(self, seq_id: int, tokens: "array[int]", num_prompt: int, drafts: "array[int]") -> bytes:
        """ceil(V / 32) int32 words: bit t % 32 of word t // 32 says that token t may follow `tokens`, the first
        `num_prompt` of which are the prompt, and then `drafts`, both int32. All zero: nothing may follow. A function of
        output and drafts alone; drafts may be taken back, the output only grows."""
        ...
