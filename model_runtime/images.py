"""The embeddings of images between steps: encoded by the plan's jobs, kept by slot until the plan drops them.

Owned by the runner, engine and worker processes. The scheduler decides which slot holds which image and for how long;
nothing here knows of requests. Small images of a step go through the tower together, whichever requests they belong to:
products of more rows are faster. Large ones go one by one, and the memory at the peak is that of one. Of several ranks
each encodes some of a step's images, and all get the embeddings.

Legend: N embeddings of an image, C hidden size of the language model; in `TowerKernels` T rows, K input and N output
features. Of pixels as in `vision.encoder.inputs`: table [C, V], tiles [N, H, W, C].
"""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from model_runtime.batch import ImageRows
from model_runtime.ops.registry import Activation, Ops
from model_runtime.parallel import Alone, Collectives
from scheduler.plan import ImageJobs, ImagePixels, StepPlan, ints
from vision.encoder.inputs import image_input
from vision.encoder.model import GROUP_PATCHES, ImageEncoder, ImageFeatures, ImageInput
from vision.encoder.parameters import Matrix


class TowerKernels:
    """A tower computed with the operations of the language model, its matrices packed in their storage type. With the
    compiled ones an image's embeddings are the same bit for bit whatever is encoded beside it and by however many
    threads."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def matrix(self, weight_NK: Tensor, bias_N: Tensor | None) -> Matrix:
        """See `vision.encoder.parameters.Kernels`."""
        packed = self._ops.pack(weight_NK)

        def matrix(x_TK: Tensor) -> Tensor:
            return self._ops.linear(x_TK, packed, bias_N)

        return matrix

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """See `vision.encoder.parameters.Kernels`."""
        return self._ops.activate(x, activation)


class ImageStore:
    """Encodes images and holds what the language model gets for them."""

    def __init__(
        self,
        encoder: ImageEncoder,
        table_CV: Tensor,
        device: torch.device,
        groups: tuple[Collectives, Collectives] = (Alone(), Alone()),
    ) -> None:
        """`groups` are those of the ranks that share layers, and of those that share sequences: all of both have towers
        that are alike."""
        self._encoder, self._table_CV, self._device = encoder, table_CV.to(device), device
        self._tensor, self._context = groups
        self._rank = self._context.rank * self._tensor.size + self._tensor.rank
        self._size = self._context.size * self._tensor.size
        self._features: dict[int, ImageFeatures] = {}

    def step(self, plan: StepPlan) -> "tuple[tuple[ImageRows, ...], array[int]]":
        """Drop, encode, and look up the rows of the plan's spans, in this order; and the slots whose encoding failed,
        of which nothing is kept and whose rows are zero. Raises AssertionError for a slot that is not there."""
        for slot in plan.drop_slots:
            assert slot in self._features, f"slot {slot} is dropped and holds no image"
            del self._features[slot]
        jobs, failed = plan.encode, ints()
        for slot, features in zip(jobs.slots, self._encode(jobs), strict=True):
            assert slot not in self._features and slot not in failed, f"slot {slot} is encoded while it holds an image"
            if features is None:
                failed.append(slot)
            else:
                self._features[slot] = features
        spans = plan.images
        rows = [
            self._rows(row, length, slot, first, slot in failed)
            for row, length, slot, first in zip(spans.rows, spans.lengths, spans.slots, spans.firsts, strict=True)
        ]
        return tuple(rows), failed

    def _encode(self, jobs: ImageJobs) -> Iterator[ImageFeatures | None]:
        """Of each image, in order; None where that failed. Image j is encoded by rank j modulo their number."""
        rank, size = self._rank, self._size
        groups = self._groups(jobs.pixels[rank::size])
        encoded = [features for group in groups for features in self._encoder.encode(list(map(self._input, group)))]
        own = iter(encoded)
        for index, count in enumerate(jobs.num_embeddings):
            features = next(own) if index % size == rank else None
            if features is not None and not _is_sound(features, count):
                features = None
            yield features if size == 1 else self._shared(features, count, index % size)

    def _shared(self, features: ImageFeatures | None, count: int, source: int) -> ImageFeatures | None:
        """On every rank, what the source has. Of an image that failed there, no number is finite."""
        config = self._encoder.config
        shape = (1 + len(config.deepstack), count, config.projector.out_size)
        levels_LNC = torch.full(shape, torch.nan, device=self._device)
        if features is not None:
            torch.stack((features.embeddings_NO, *features.deepstack_NO), out=levels_LNC)
        context, tensor = divmod(source, self._tensor.size)
        if context == self._context.rank:
            self._tensor.broadcast(levels_LNC, tensor)
        self._context.broadcast(levels_LNC, context)
        shared = ImageFeatures(embeddings_NO=levels_LNC[0], deepstack_NO=tuple(levels_LNC[1:]))
        return shared if _is_sound(shared, count) else None

    def _groups(self, jobs: Sequence[ImagePixels]) -> Iterator[list[ImagePixels]]:
        """Neighbours that have at most GROUP_PATCHES patches together, or one image that has more."""
        most = GROUP_PATCHES * self._encoder.config.tower.patch_size**2
        group: list[ImagePixels] = []
        room = most
        for pixels in jobs:
            if group and pixels.num_pixels > room:
                yield group
                group, room = [], most
            group.append(pixels)
            room -= pixels.num_pixels
        if group:
            yield group

    def _input(self, pixels: ImagePixels) -> ImageInput:
        flat = np.frombuffer(pixels.data, dtype=np.uint8)
        assert len(flat) == 3 * pixels.num_pixels, f"{len(flat)} bytes of an image of {pixels.num_pixels} pixels"
        tiles_NHWC = torch.tensor(flat, device=self._device).view(pixels.tiles, pixels.height, pixels.width, 3)
        return image_input(
            self._encoder.config,
            self._table_CV,
            tiles_NHWC,
            rows=pixels.rows,
            cols=pixels.cols,
            image_height=pixels.image_height,
            image_width=pixels.image_width,
        )

    def _rows(self, row: int, length: int, slot: int, first: int, has_failed: bool) -> ImageRows:
        if has_failed:
            config = self._encoder.config
            zeros_NC = torch.zeros(length, config.projector.out_size, device=self._device)
            return ImageRows(start=row, embeddings_NC=zeros_NC, deepstack_NC=(zeros_NC,) * len(config.deepstack))
        assert slot in self._features, f"slot {slot} is read and holds no image"
        features, part = self._features[slot], slice(first, first + length)
        count = len(features.embeddings_NO)
        assert first >= 0 and first + length <= count, f"embeddings {first} .. {first + length} of {count}"
        return ImageRows(
            start=row,
            embeddings_NC=features.embeddings_NO[part],
            deepstack_NC=tuple(level_NO[part] for level_NO in features.deepstack_NO),
        )


def _is_sound(features: ImageFeatures, count: int) -> bool:
    """Whether there are `count` embeddings, all finite."""
    levels = (features.embeddings_NO, *features.deepstack_NO)
    return len(features.embeddings_NO) == count and all(bool(level.isfinite().all()) for level in levels)
