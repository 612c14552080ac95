"""Messages between the API process and the process that checks grammars: a length, then msgpack. Both processes."""

import msgspec

from scheduler.request import OutputGrammar
from server.grammar.grammar import Grammar
from server.grammar.vocabulary import Vocabulary

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A vocabulary of a million tokens."""
LENGTH_BYTES = 4


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the check of a grammar found."""

    grammar: OutputGrammar | None = None
    error: str = ""
    """What is wrong with it, and where; empty when nothing is."""


def pack(message: Vocabulary | Grammar | Verdict) -> bytes:
    """With its length in front."""
    frame = msgspec.msgpack.encode(message)
    assert len(frame) <= MAX_FRAME_BYTES, f"a frame of {len(frame)} bytes"
    return len(frame).to_bytes(LENGTH_BYTES, "big") + frame
