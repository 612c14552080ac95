"""What is guessed of a sequence's text, and how often that was right. Made by `drafts.py`, kept with the sequence,
engine process.
"""

from array import array
from dataclasses import dataclass, field

from scheduler.plan import ints

FIRST_RATES = (0.4, 0.6, 0.8, 0.9)
"""Share of right guesses that a sequence is trusted with before it has shown any: behind runs of 2 or 3 tokens that
stood before, of 4 to 7, of 8 to 15, and of 16 or more."""
RATE_STEP = 0.2
"""Weight of the newest guess in the share of right ones."""


@dataclass(slots=True)
class Guesses:
    """What has been guessed of one sequence's text, and how often that was right.

    A guess counts whether or not it was computed as a draft: one that is not worth a row costs nothing to judge, so a
    sequence that was given up is found again when its text begins to repeat.
    """

    rates: list[float]
    """Share of right ones, by how sure a guess is (`level`)."""
    level: int = 0
    """Of the last guess,"""
    tokens: "array[int]" = field(default_factory=ints)
    """what it was,"""
    position: int = 0
    """and where in the text it began."""
    computed: int = 0
    """Tokens of the text whose keys and values a draft model has."""

    @property
    def rate(self) -> float:
        """How likely each token of the last guess is to hold when those before it do."""
        return self.rates[self.level]

    def judge(self, text: "array[int]") -> None:
        """Compare the last guess with how the text went on."""
        for guess, token in zip(self.tokens, text[self.position :], strict=False):
            right = guess == token
            self.rates[self.level] += RATE_STEP * (right - self.rates[self.level])
            if not right:
                break


def level_of(length: int) -> int:
    """How sure a guess is behind a run of so many tokens: an index into FIRST_RATES."""
    return min(max(length.bit_length() - 2, 0), len(FIRST_RATES) - 1)


def go_on(text: "array[int]", place: int, count: int) -> "array[int]":
    """`count` tokens from text[place] on; where it ends it repeats what it has, as an overlapping copy of LZ77 does."""
    tokens = text[place : place + count]
    while len(tokens) < count:
        tokens.extend(tokens[: count - len(tokens)])
    return tokens
