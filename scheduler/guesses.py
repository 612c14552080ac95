"""What is guessed of a sequence's text, and how often that was right. Made by `drafts.py`, kept with the sequence,
engine process.
"""

from array import array
from dataclasses import dataclass, field

from scheduler.plan import ints

FIRST_RATE = 0.5
"""Share of right guesses that a sequence is trusted with before it has shown any."""
RATE_STEP = 0.2
"""Weight of the newest guess in the share of right ones."""


@dataclass(slots=True)
class Guesses:
    """What has been guessed of one sequence's text, and how often that was right.

    A guess counts whether or not it was computed as a draft: one that is not worth a row costs nothing to judge, so a
    sequence that was given up is found again when its text begins to repeat.
    """

    rate: float = FIRST_RATE
    tokens: "array[int]" = field(default_factory=ints)
    """The last guess,"""
    position: int = 0
    """and where in the text it began."""
    computed: int = 0
    """Tokens of the text whose keys and values a draft model has."""

    def judge(self, text: "array[int]") -> None:
        """Compare the last guess with how the text went on."""
        for guess, token in zip(self.tokens, text[self.position :], strict=False):
            right = guess == token
            self.rate += RATE_STEP * (right - self.rate)
            if not right:
                break


def go_on(text: "array[int]", place: int, count: int) -> "array[int]":
    """`count` tokens from text[place] on; where it ends it repeats what it has, as an overlapping copy of LZ77 does."""
    tokens = text[place : place + count]
    while len(tokens) < count:
        tokens.extend(tokens[: count - len(tokens)])
    return tokens
