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


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Check a grammar. Numbers are of the asker's choice, each used once."""

    number: int
    grammar: Grammar


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this answer any more. Harmless when it has been given."""

    number: int


class Answer(msgspec.Struct, frozen=True):
    """To an `Ask`, or to a `Stop` in time."""

    number: int
    verdict: Verdict | None
    """None where the check ended without one: it was stopped, or the grammar was too much for the library."""


READY = Answer(0, None)
"""The first message: numbers of grammars count from 1."""


def pack(message: Vocabulary | Ask | Stop | Answer) -> bytes:
    """With its length in front."""
    frame = msgspec.msgpack.encode(message)
    assert len(frame) <= MAX_FRAME_BYTES, f"a frame of {len(frame)} bytes"
    return len(frame).to_bytes(LENGTH_BYTES, "big") + frame


def take_frames(data: bytearray) -> list[bytes]:
    """The whole frames at the beginning of what has come; takes them out."""
    frames, start = [], 0
    while (begin := start + LENGTH_BYTES) <= len(data):
        end = begin + int.from_bytes(data[start:begin], "big")
        if end > len(data):
            break
        frames.append(bytes(data[begin:end]))
        start = end
    del data[:start]
    return frames
