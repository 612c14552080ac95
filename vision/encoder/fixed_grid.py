"""The ViT over square images of one size: CLIP, SigLIP, Idefics 3 / SmolVLM, InternViT. Called by `model.py`.

Engine and worker processes. Holds weights, keeps no state.

Legend: B images (tiles), P patches of each, S sides of an image in patches, X tokens of each (P, and one for a class
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


def bucketised_positions(side: int) -> Tensor:
    """[P] int64: the row of a side x side table that each patch of as many takes in Idefics 3.

    Row r of n would be row floor(n x r / n) of the table, were it not for r / n in float32: here and there that is the
    row before.
    """
    edges = torch.arange(1 / side, 1.0, 1 / side)
    fraction_S = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    row_S = torch.bucketize(fraction_S.clamp(max=1.0 - 1e-6), edges, right=True)
    return (row_S[:, None] * side + row_S).flatten()


class FixedGridTower:
    """Pixels in, one feature per patch out."""

    def __init__(self, config: FixedGridConfig, parameters: Parameters) -> None:
        self.config, self.parameters = config, parameters
        self.position_XC = parameters.vectors["position"].flatten(0, -2)
        if config.bucketised_positions:
            self.position_XC = self.position_XC[bucketised_positions(config.grid).to(self.position_XC.device)]
        self.blocks = [Block(config.block, layer, parameters) for layer in range(max(config.feature_layers))]

    def _embedded(self, pixels_BCHW: Tensor) -> Tensor:
        """[B, X, C]: patches and class token with their positions."""
        x_BPC = self.parameters.linear(patchify(pixels_BCHW, self.config.patch_size), "patch")
        if self.config.keys.class_token is not None:
            token_B1C = self.parameters.vectors["class_token"].reshape(1, 1, -1).expand(len(x_BPC), 1, -1)
            x_BPC = torch.cat([token_B1C, x_BPC], dim=1)
        return x_BPC + self.position_XC

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        """[B, P, F], or one more for a class token that is kept. Images are squares of image_size."""
        config, eps = self.config, self.config.block.norm_eps
        x_BXC = self._embedded(pixels_BCHW)
        batch, width = len(x_BXC), x_BXC.shape[1]
        x_TC = x_BXC.flatten(0, 1)
        if config.keys.pre_norm is not None:
            x_TC = self.parameters.normed(x_TC, "pre_norm", "layer", eps)
        attend = attend_batch(batch)
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
