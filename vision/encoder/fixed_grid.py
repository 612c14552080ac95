"""The ViT over square images of one size: CLIP, SigLIP, Idefics 3 / SmolVLM, InternViT. Called by `model.py`.

Engine and worker processes. Holds weights, keeps no state.

Legend: B images (tiles), P patches of each, S side of an image in patches, X tokens of each (P, and one for a class
token), C hidden size, F feature size, K numbers in a patch.
"""

import torch
from torch import Tensor

from vision.encoder.attention import attend_batch
from vision.encoder.block import Block
from vision.encoder.parameters import Parameters
from vision.tower_config import FixedGridConfig


def patchify(pixels_BCHW: Tensor, patch_size: int) -> Tensor:
    """[B, channels, H, W] -> [B, P, K]: patches in rows, each channel by channel; what is left over is cut off."""
    batch, channels, height, width = pixels_BCHW.shape
    rows, columns = height // patch_size, width // patch_size
    pixels_BCHW = pixels_BCHW[:, :, : rows * patch_size, : columns * patch_size]
    split = pixels_BCHW.reshape(batch, channels, rows, patch_size, columns, patch_size)
    return split.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)


def bucketised_positions(mask_BSS: Tensor, side: int) -> Tensor:
    """[B, P] int64 rows of a side x side table for patches that a mask (bool, a rectangle from the top left) keeps.

    Row r of n kept rows takes row floor(side x r / n) of the table, with r / n in float32; masked patches take 0.
    """
    edges = torch.arange(1 / side, 1.0, 1 / side, device=mask_BSS.device)

    def buckets(kept_B: Tensor) -> Tensor:
        index = torch.arange(mask_BSS.shape[1], dtype=torch.float32, device=mask_BSS.device)
        fraction_BS = (index[None, :] * (1.0 / kept_B)[:, None]).clamp(max=1.0 - 1e-6)
        return torch.bucketize(fraction_BS, edges, right=True)

    rows_BS, columns_BS = buckets(mask_BSS[:, :, 0].sum(dim=1)), buckets(mask_BSS[:, 0, :].sum(dim=1))
    positions_BSS = rows_BS[:, :, None] * side + columns_BS[:, None, :]
    return torch.where(mask_BSS, positions_BSS, 0).flatten(1)


class FixedGridTower:
    """Pixels in, one feature per patch out."""

    def __init__(self, config: FixedGridConfig, parameters: Parameters) -> None:
        self.config, self.parameters = config, parameters
        self.position_XC = parameters.vectors["position"].flatten(0, -2)
        self.blocks = [Block(config.block, layer, parameters) for layer in range(max(config.feature_layers))]

    def _embedded(self, pixels_BCHW: Tensor, mask_BSS: Tensor | None) -> Tensor:
        """[B, X, C]: patches and class token with their positions."""
        x_BPC = self.parameters.linear(patchify(pixels_BCHW, self.config.patch_size), "patch")
        if self.config.bucketised_positions:
            side = pixels_BCHW.shape[-1] // self.config.patch_size
            if mask_BSS is None:
                mask_BSS = torch.ones(len(x_BPC), side, side, dtype=torch.bool, device=x_BPC.device)
            return x_BPC + self.position_XC[bucketised_positions(mask_BSS, self.config.grid)]
        if self.config.keys.class_token is not None:
            token_B1C = self.parameters.vectors["class_token"].reshape(1, 1, -1).expand(len(x_BPC), 1, -1)
            x_BPC = torch.cat([token_B1C, x_BPC], dim=1)
        return x_BPC + self.position_XC

    def forward(self, pixels_BCHW: Tensor, mask_BSS: Tensor | None) -> Tensor:
        """[B, P, F], or one more for a class token that is kept.

        Pixels are square, of image_size unless positions are bucketised. The mask [B, S, S] bool, only for bucketised
        positions, says which patches hold pixels; the others are seen by none, and have features all the same.
        """
        config, eps = self.config, self.config.block.norm_eps
        x_BXC = self._embedded(pixels_BCHW, mask_BSS)
        batch, width = len(x_BXC), x_BXC.shape[1]
        x_TC = x_BXC.flatten(0, 1)
        if config.keys.pre_norm is not None:
            x_TC = self.parameters.normed(x_TC, "pre_norm", "layer", eps)
        attend = attend_batch(batch, None if mask_BSS is None else mask_BSS.flatten(1))
        kept = {0: x_TC}
        for layer, block in enumerate(self.blocks, start=1):
            x_TC = block.forward(x_TC, attend, None)
            if layer in config.feature_layers:
                kept[layer] = x_TC
        features_TF = torch.cat([kept[layer] for layer in config.feature_layers], dim=-1)
        if config.keys.final_norm is not None:
            features_TF = self.parameters.normed(features_TF, "final_norm", "layer", eps)
        features_BXF = features_TF.reshape(batch, width, -1)
        return features_BXF[:, 1:] if config.drop_class_token else features_BXF
