"""LLaVA's projector, started from words: a class that the encoder's heads see becomes the embedding of its name.

Used by the alignment. Shapes: W the tower's width, R rows of the heads, H the language model's width.
"""

from collections.abc import Callable

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

GAIN = 4.0
"""A detector's logit where its class is, about; its column is divided by it."""
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
def start_from_words(projector: Projector, heads: Heads, embedding: Callable[[str], Tensor]) -> None:
    """`embedding` gives [H] for a word. Rows beyond the heads' start as noise that nothing hears yet."""
    words = [name for head in HEADS for name in NAMES[head]]
    rows = len(words)
    assert rows == heads.classes.out_features <= projector.linear_1.out_features
    first, second = projector.linear_1, projector.linear_2
    nn.init.trunc_normal_(first.weight, std=first.in_features**-0.5)
    first.bias.zero_()
    first.weight[:rows] = heads.classes.weight
    first.bias[:rows] = heads.classes.bias
    second.weight.zero_()
    second.bias.zero_()
    second.weight[:, :rows] = torch.stack([embedding(word) / GAIN for word in words], dim=1)
