"""A picture in the first prompt of a model with images: noise, made ready as the model's recipe says, and how
transformers and the product are given it. Process of `firstlight align`.

Legend: N embeddings of the picture, C hidden size, T tokens of a step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from model_runtime.batch import ImageRows
from model_runtime.image_side import ImageSide
from scheduler.plan import ImageSpans, StepPlan, ints
from vision.encoder.inputs import image_input
from vision.encoder.model import ImageFeatures, ImageInput
from vision.placeholders import Span, mrope_positions
from vision.tower_config import PackedConfig

HEIGHT, WIDTH = 60, 97
START = 5
"""Tokens of text before the picture."""
TYPES: Mapping[str, str] = {"gemma3": "token_type_ids"} | dict.fromkeys(
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), "mm_token_type_ids"
)
"""The argument that tells image tokens from text, without which these models of transformers take all for text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What both sides are given."""

    image: ImageInput
    family: str
    token_id: int
    """Of each embedding's place."""
    length: int
    """N."""
    is_whole: bool
    """Its pixels go to the tower as they are, whatever their size (Pixtral)."""
    cells: tuple[int, int]
    """Rows and columns of embeddings, where the model turns by them."""

    @property
    def end(self) -> int:
        """The first position behind it."""
        return START + self.length

    def within(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """A prompt with its tokens in the middle."""
        return (*prompt[:START], *([self.token_id] * self.length), *prompt[START:])

    def arguments(self, ids_1L: Tensor) -> dict[str, Tensor]:
        """Of transformers' model, beside the token ids."""
        pixels, image = self.image.pixels, self.image
        found = {"pixel_values": pixels}
        if self.family in ("idefics3", "smolvlm", "llava_next", "llava_onevision"):
            found["pixel_values"] = pixels[None]
        if self.family.startswith("kimi"):
            side = math.isqrt(pixels.shape[1] // 3)
            found["pixel_values"] = pixels.view(-1, 3, side, side)
        if image.size is not None:
            found["image_sizes"] = torch.tensor([image.size])
        elif image.grid is not None:
            found["image_grid_thw"] = torch.tensor([[1, *image.grid]])
        elif self.is_whole:
            found["image_sizes"] = torch.tensor([pixels.shape[2:]])
        if self.family in TYPES:
            found[TYPES[self.family]] = (ids_1L == self.token_id).int()
        return found

    def planned(self, plan: StepPlan, first_row: int) -> StepPlan:
        """A step that has the whole picture, whose prompt's tokens begin at `first_row`."""
        row, end = ints([first_row + START]), ints([self.end])
        spans = ImageSpans(
            rows=row, lengths=ints([self.length]), slots=ints([0]), firsts=ints([0]), starts=ints([START]), ends=end
        )
        return replace(plan, images=spans)

    def positions(self, length: int) -> list[tuple[int, ...]]:
        """Three of each token of the prompt with the picture."""
        span = Span(offset=START, length=self.length, image=0, first=0)
        return [tuple(row) for row in mrope_positions(length, [span], [self.cells])[0].T.tolist()]

    def rows(self, features: ImageFeatures, first_row: int) -> ImageRows:
        """For the batch of that step."""
        start = first_row + START
        return ImageRows(start=start, embeddings_NC=features.embeddings_NO, deepstack_NC=features.deepstack_NO)


def make_picture(side: ImageSide, family: str) -> Picture:
    """The same at every call."""
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    recipe = side.preprocessor.recipe
    layout = recipe.layout(HEIGHT, WIDTH)
    image = image_input(
        side.tower,
        side.table_CV,
        torch.tensor(recipe.tiles(Image.fromarray(noise))),
        rows=layout.rows,
        cols=layout.cols,
        image_height=layout.image_height,
        image_width=layout.image_width,
    )
    merge = side.tower.projector.merge_size if hasattr(side.tower.projector, "merge_size") else 1
    grid = image.grid or (merge, merge)
    return Picture(
        image=image,
        family=family,
        token_id=side.preprocessor.image_token_id,
        length=sum(piece for piece in side.preprocessor.markup.pieces(layout) if isinstance(piece, int)),
        is_whole=isinstance(side.tower.tower, PackedConfig) and side.tower.tower.layout == "pixels",
        cells=(grid[0] // merge, grid[1] // merge),
    )
