"""The image side of one checkpoint: processed images in, vectors for the language model out.

Made from `readers.read_vision` and `weights.load_vision`; `model_runtime/images.py` calls `encode` for each image job
of a step, in the engine and worker processes. Holds weights, keeps no state; what an image becomes does not depend on
its neighbours, bit for bit if that holds for the kernels that it is given.

Legend: B tiles of an image, H and W sides in pixels, T patches, K numbers in a patch, P patches of a tile, N vectors of
an image, F width of the tower's features, O width of the language model.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vision.encoder.fixed_grid import FixedGridTower, patchify
from vision.encoder.packed import Grid, PackedTower
from vision.encoder.parameters import Kernels, Parameters, pack_parameters
from vision.projector import MergeProjector, PoolProjector, merge_cells, pack_tiles
from vision.tower_config import FixedGridConfig, MergeConfig, PackedConfig, TilesConfig, VisionTowerConfig

GROUP_PATCHES = 1024
"""Patches of small tiles that go through a tower together: what bounds the memory of an image of many tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """One processed image; which fields are set depends on the family."""

    pixels: Tensor
    """Fixed grid: tiles [B, 3, H, H]. Pixtral: [1, 3, H, W]. Kimi: patches [T, K] row by row. Qwen: patches [T, K] in
    the order of `packed.block_order`."""
    grid: Grid | None = None
    """Qwen, Kimi: rows and columns of patches."""
    tile_grid: tuple[int, int] | None = None
    """LLaVA-NeXT, OneVision: rows and columns of tiles, without the small copy; None if there is only the copy."""
    size: tuple[int, int] | None = None
    """LLaVA-NeXT, OneVision: height and width of the image before any resizing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFeatures:
    """What the language model gets for one image."""

    embeddings_NO: Tensor
    deepstack_NO: tuple[Tensor, ...] = ()
    """Qwen3-VL: to be added to the hidden state after the first, second, ... block of the language model."""


class _FixedGridEncoder:
    """Tiles go through the tower and the projector in groups, those of all images alike."""

    def __init__(self, config: VisionTowerConfig, tower: FixedGridConfig, parameters: Parameters) -> None:
        self.config, self.tower_config = config, tower
        self.tower = FixedGridTower(tower, parameters)
        self.newline_O = parameters.vectors.get("newline")
        self.projector: MergeProjector | PoolProjector
        if isinstance(config.projector, MergeConfig):
            self.projector = MergeProjector(config.projector, "projector", parameters)
        else:
            self.projector = PoolProjector(config.projector, "projector", parameters)

    def _projected(self, features_BPF: Tensor) -> Tensor:
        """[B, P, F] -> [B, N, O]."""
        if isinstance(self.projector, MergeProjector) and self.projector.config.merge_size == 1:
            return self.projector.forward(features_BPF.flatten(0, 1)[:, None]).reshape(*features_BPF.shape[:2], -1)
        side = math.isqrt(features_BPF.shape[1])
        assert side**2 == features_BPF.shape[1], f"{features_BPF.shape[1]} patches are no square"
        return self.projector.forward_grid(features_BPF.reshape(-1, side, side, features_BPF.shape[-1]))

    def _packed(self, tiles_BNO: Tensor, image: ImageInput, tiles: TilesConfig) -> Tensor:
        assert image.size is not None and self.newline_O is not None, "an image of tiles comes with its size"
        tile_grid = (0, 0) if image.tile_grid is None else image.tile_grid
        assert len(tiles_BNO) == 1 + math.prod(tile_grid), f"{len(tiles_BNO)} tiles, their grid is {tile_grid}"
        return pack_tiles(tiles_BNO, tile_grid, image.size, self.newline_O, tiles.max_tiles)

    def encode(self, images: Sequence[ImageInput]) -> list[ImageFeatures]:
        pixels_BCHW = torch.cat([image.pixels for image in images])
        height, width = pixels_BCHW.shape[2:]
        assert height == width == self.tower_config.image_size, f"tiles of {height} x {width} pixels"
        groups = torch.split(pixels_BCHW, max(1, GROUP_PATCHES // self.tower_config.grid**2))
        projected_BNO = torch.cat([self._projected(self.tower.forward(group_BCHW)) for group_BCHW in groups])
        counts = [len(image.pixels) for image in images]
        result = []
        for image, tiles_BNO in zip(images, torch.split(projected_BNO, counts), strict=True):
            tiles = self.config.tiles
            vectors = tiles_BNO.flatten(0, 1) if tiles is None else self._packed(tiles_BNO, image, tiles)
            result.append(ImageFeatures(embeddings_NO=vectors))
        return result


class _PackedEncoder:
    """Patches of all images go through the tower as one sequence."""

    def __init__(
        self, tower: PackedConfig, projector: MergeConfig, deepstack: tuple[MergeConfig, ...], parameters: Parameters
    ) -> None:
        self.tower_config = tower
        self.tower = PackedTower(tower, parameters)
        self.projector = MergeProjector(projector, "projector", parameters)
        self.deepstack = [
            MergeProjector(config, f"deepstack.{index}", parameters) for index, config in enumerate(deepstack)
        ]

    def _merged(self, merger: MergeProjector, x_TC: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
        """[N, O] of each image, which have these lengths N."""
        cells_NmC = x_TC.reshape(sum(lengths), -1, x_TC.shape[1])
        return torch.split(merger.forward(cells_NmC), lengths)

    def _patches(self, image: ImageInput) -> tuple[Tensor, Grid]:
        """[T, K] and their grid."""
        config, patches_TK, grid = self.tower_config, image.pixels, image.grid
        if config.layout == "pixels":
            height, width = image.pixels.shape[2:]
            grid = (height // config.patch_size, width // config.patch_size)
            patches_TK = patchify(image.pixels, config.patch_size)[0]
        assert grid is not None, "packed patches come with their grid"
        shape = (math.prod(grid), config.patch_width)
        assert patches_TK.shape == shape, f"patches of shape {tuple(patches_TK.shape)}, not {shape}"
        if config.layout != "cells" and config.merge_size > 1:
            patches_TK = merge_cells(patches_TK.reshape(1, *grid, -1), config.merge_size).reshape(shape)
        return patches_TK, grid

    def encode(self, images: Sequence[ImageInput]) -> list[ImageFeatures]:
        patches, grids = zip(*(self._patches(image) for image in images), strict=True)
        features = self.tower.forward(torch.cat(patches), grids)
        cell = self.tower_config.merge_size**2
        lengths = [math.prod(grid) // cell for grid in grids]
        vectors = self._merged(self.projector, features.last_TC, lengths)
        levels = [
            self._merged(merger, level_TC, lengths)
            for merger, level_TC in zip(self.deepstack, features.deepstack_TC, strict=True)
        ]
        return [
            ImageFeatures(embeddings_NO=vector_NO, deepstack_NO=tuple(level[index] for level in levels))
            for index, vector_NO in enumerate(vectors)
        ]


class ImageEncoder:
    """Tower and projector of one checkpoint."""

    def __init__(self, config: VisionTowerConfig, tensors: dict[str, Tensor], kernels: Kernels) -> None:
        """Tensors as `weights.load_vision` returns them, in the checkpoint's dtype; they are taken out of the
        dictionary. Everything is computed in float32 on their device."""
        self.config = config
        self._use(pack_parameters(tensors, kernels))

    def _use(self, parameters: Parameters) -> None:
        self.parameters, config = parameters, self.config
        self._encoder: _FixedGridEncoder | _PackedEncoder
        if isinstance(config.tower, FixedGridConfig):
            self._encoder = _FixedGridEncoder(config, config.tower, parameters)
        else:
            assert isinstance(config.projector, MergeConfig), "packed towers merge patches"
            self._encoder = _PackedEncoder(config.tower, config.projector, config.deepstack, parameters)

    def with_parameters(self, parameters: Parameters) -> "ImageEncoder":
        """The same tower and projector with other weights."""
        made = copy.copy(self)
        made._use(parameters)
        return made

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageInput]) -> list[ImageFeatures]:
        """One result per image, in order; at least one image. Tiles of a batch are all of one size."""
        return self._encoder.encode(images)
