"""Figures of an examination: counts of right answers, as a table for people, and as what `firstlight validate` expects.
Written by `evaluate.py`; `Recorded` lies beside the weights. Pure.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

PICTURE = "picture"
"""The round that shows what is asked about; the others are controls."""
BEGIN, END = "<!-- figures: written by vision.embedded.evaluate --card -->", "<!-- end of figures -->"


class Score(msgspec.Struct, frozen=True):
    """Of one task."""

    right: int
    asked: int

    @property
    def share(self) -> float:
        """Of right answers."""
        return self.right / self.asked

    @property
    def margin(self) -> float:
        """By how much the share of another draw of as many questions would differ, in 19 of 20 (Wilson's interval, the
        larger side)."""
        z, n, p = 1.96, self.asked, self.share
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(p - (middle - half), middle + half - p)


class Figures(msgspec.Struct, frozen=True):
    """Of one examination."""

    model: str
    scores: Mapping[str, Mapping[str, Score]]
    """By round and task."""


class Recorded(msgspec.Struct, frozen=True):
    """Whether each answer was right, by task a string of 0 and 1 in the order of the questions."""

    tasks: Mapping[str, str]

    @classmethod
    def of(cls, right: Mapping[str, Sequence[bool]]) -> "Recorded":
        """From the answers."""
        return cls({task: "".join(str(int(one)) for one in each) for task, each in right.items()})


def as_table(figures: Figures) -> str:
    """Markdown, which is readable as text too."""
    rounds = [kind for kind in figures.scores if kind != PICTURE]
    head = ["task", "right", "questions", *rounds]
    rows = []
    for task, score in figures.scores[PICTURE].items():
        others = [_percent(figures.scores[kind][task]) for kind in rounds]
        rows.append([task, _percent(score), str(score.asked), *others])
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _percent(score: Score) -> str:
    return f"{score.share:.1%} ± {score.margin * 100:.1f}"


def with_figures(card: str, figures: Figures) -> str:
    """The text of a model card with its table replaced. Raises ValueError for one that has no place for it."""
    before, begin, rest = card.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the card lacks {BEGIN!r} or, behind it, {END!r}")
    return f"{before}{BEGIN}\n\n{as_table(figures)}\n\n{END}{after}"
