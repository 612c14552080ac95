"""LLaVA's projector, started from words: a class that the encoder's heads see becomes the embedding of its name.

Used by the alignment. Shapes: W the tower's width, R rows of the heads, H the language model's width.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision.embedded.heads import Heads
from vision.embedded.questions import NUMBERS
from vision.embedded.vocabulary import (
    COLOUR_NAMES,
    COLUMNS,
    GLYPHS,
    HEADS,
    ICON_NAMES,
    KINDS,
    MAX_COUNT,
    RANKS,
    ROWS,
    SCENES,
    SHAPES,
    SIZES,
)

PRESENT = 4.0
"""What a row gives where its class is, on average: the rows of a head are shifted to it, and columns divided by it. A
head that is still unsure would say nothing through GELU if its logits stayed below zero."""
LOUDNESS: Mapping[str, float] = {"kind": 0.3, "scene": 0.3, "column": 0.5, "row": 0.5, "size": 0.5}
"""Of the words of a head, 1 for others: what is on every patch shall not drown what is on few."""
ORDER = ("first", "second", "third", "fourth", "fifth", "sixth")

NAMES = {
    "kind": KINDS,
    "scene": SCENES,
    "count": NUMBERS[:MAX_COUNT],
    "column": COLUMNS,
    "row": ROWS,
    "colour": COLOUR_NAMES,
    "shape": SHAPES,
    "size": SIZES,
    "icon": ICON_NAMES,
    "glyph": tuple(GLYPHS),
    "rank": RANKS,
    "order": ORDER,
}
"""A word for each class of each head, in the order of the rows."""


class Projector(nn.Module):
    """Two layers with GELU between, both as wide as the language model."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(width, hidden)
        self.linear_2 = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[..., W] to [..., H]"""
        result: Tensor = self.linear_2(F.gelu(self.linear_1(x)))
        return result


@torch.no_grad()
def start_from_words(
    projector: Projector, heads: Heads, present: Mapping[str, float], embedding: Callable[[str], Tensor]
) -> None:
    """`present` has the mean logit of a head's classes where they are, `embedding` gives [H] for a text. Rows beyond
    the heads' start as noise that nothing hears yet. Letters and digits are what an answer has them as: no words, which
    begin with a space."""
    texts = {head: [name if head == "glyph" else f" {name}" for name in NAMES[head]] for head in HEADS}
    words = [embedding(text) * LOUDNESS.get(head, 1.0) for head in HEADS for text in texts[head]]
    shifts = [PRESENT - present[head] for head in HEADS for _ in NAMES[head]]
    rows = len(words)
    assert rows == heads.classes.out_features <= projector.linear_1.out_features
    first, second = projector.linear_1, projector.linear_2
    nn.init.trunc_normal_(first.weight, std=first.in_features**-0.5)
    first.bias.zero_()
    first.weight[:rows] = heads.classes.weight
    first.bias[:rows] = heads.classes.bias + torch.tensor(shifts, device=first.bias.device)
    second.weight.zero_()
    second.bias.zero_()
    second.weight[:, :rows] = torch.stack(words, dim=1) / PRESENT
