"""What an image tower and its projector look like: the shapes, flags and checkpoint names that one family fixes.

Made from a checkpoint's config.json by `encoder/readers.py`; read by `weights.py` (which tensors to load) and by
`encoder/` and `projector.py` (what to compute). Engine and worker processes; imports nothing.
"""

from dataclasses import dataclass
from typing import Literal


class VisionConfigError(ValueError):
    """The image side of a config.json asks for something that is not supported; the message names the key."""


class VisionWeightsError(ValueError):
    """The checkpoint's image tensors are not those that its config.json declares; the message names the tensor."""


Norm = Literal["layer", "rms"]
Axial = Literal["shared", "staggered", "interleaved"]
"""How a head's angles divide between row and column: halves with the same frequencies, halves with the even and the odd
ones (Pixtral), or column and row in turn over neighbouring numbers (MoonViT)."""
PatchLayout = Literal["cells", "rows", "pixels"]
"""How one image arrives: patches cell by cell, patches row by row, or pixels [1, C, H, W]."""
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKeys:
    """How a family's checkpoint names the parts of one transformer block. `layer` holds {} for the block's number."""

    layer: str
    norm1: str
    norm2: str
    qkv: tuple[str, ...]
    """One fused tensor, or query, key and value."""
    out: str
    mlp_in: tuple[str, ...]
    """One tensor, or gate and up."""
    mlp_out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """One pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    norm: Norm
    norm_eps: float
    activation: Activation
    keys: BlockKeys
    gated: bool = False
    """down(activation(gate(x)) * up(x)) rather than down(activation(up(x)))."""
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    qk_norm: bool = False
    """Queries and keys pass an RMS norm over all heads together (eps 1e-6)."""
    layer_scale: bool = False
    """Each branch is multiplied by a learned vector before it is added."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedGridKeys:
    """How a family's checkpoint names what stands before and after the blocks; None is a part it does not have."""

    patch: str
    position: str
    position_rank: int = 2
    """3 if the table of positions has a leading axis of one."""
    class_token: str | None = None
    class_token_rank: int = 1
    pre_norm: str | None = None
    final_norm: str | None = None
    unread: tuple[str, ...] = ()
    """Beginnings of keys that checkpoints hold and that image features do not depend on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedGridConfig:
    """A ViT over square images (tiles) of one size."""

    block: BlockConfig
    keys: FixedGridKeys
    num_layers: int
    image_size: int
    patch_size: int
    num_channels: int
    patch_bias: bool
    feature_layers: tuple[int, ...]
    """After how many blocks the features are taken; several are concatenated."""
    drop_class_token: bool
    bucketised_positions: bool = False
    """Positions are looked up by fractions of the side, as in Idefics 2 and 3."""

    @property
    def grid(self) -> int:
        """Patches along one side of an image of image_size."""
        return self.image_size // self.patch_size

    @property
    def feature_size(self) -> int:
        """Width of the tower's output."""
        return self.block.hidden_size * len(self.feature_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedConfig:
    """A NaViT: images of any size, their patches packed into one sequence; axial rotary positions."""

    block: BlockConfig
    num_layers: int
    patch_size: int
    patch_width: int
    """Numbers in one patch: channels x frames x patch_size x patch_size."""
    patch_key: str
    patch_bias: bool
    patch_rank: int
    """Axes of the checkpoint's patch weight: 4 for a 2-D convolution, 5 for a 3-D one."""
    merge_size: int
    """Patches come in blocks of merge_size x merge_size; 1 is plain rows."""
    rope_theta: float
    axial: Axial = "shared"
    layout: PatchLayout = "cells"
    pre_norm_key: str | None = None
    final_norm_key: str | None = None
    position_key: str | None = None
    """A learned square of positions, resampled to each image: bilinearly with corners aligned, unless bicubic."""
    position_side: int = 0
    position_bicubic: bool = False
    position_rank: int = 2
    """3 if the checkpoint holds the positions as [side, side, C]."""
    window_cells: int = 0
    """Side of an attention window in merged cells; 0 is attention over the whole image in every block."""
    full_attention_layers: frozenset[int] = frozenset()
    """Blocks that see the whole image although windows are on."""
    deepstack_layers: tuple[int, ...] = ()
    """Blocks after which the hidden state also goes through a merger of its own to the language model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeKeys:
    """How a family's checkpoint names the parts of a merging projector; None is a part it does not have."""

    first: str
    second: str | None = None
    norm: str | None = None
    merging: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeConfig:
    """Joins merge_size x merge_size neighbouring patches, then one linear layer, or two with an activation between."""

    in_size: int
    """Width of one patch."""
    out_size: int
    hidden_size: int
    """Between the two layers; unused if there is one."""
    keys: MergeKeys
    bias: bool
    merge_size: int = 1
    activation: Activation = "gelu"
    norm: Norm = "layer"
    norm_eps: float = 1e-5
    norm_after_merge: bool = False
    channel_major: bool = False
    """Merged patches are laid out channel by channel and pass a linear layer of their own (Mistral 3)."""

    @property
    def merged_size(self) -> int:
        """Width of what the first layer reads."""
        return self.in_size if self.keys.merging is not None else self.in_size * self.merge_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Gemma 3: average over squares of patches, RMS norm with weight 1 + w, one matrix stored [in, out]."""

    in_size: int
    out_size: int
    pool_size: int
    norm_eps: float
    norm_key: str
    matrix_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesConfig:
    """LLaVA-NeXT and OneVision: an image is a small copy and a grid of tiles, cropped and joined row by row."""

    newline_key: str
    max_tiles: int | None
    """Larger grids are shrunk to about this many tiles; None never shrinks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTowerConfig:
    """The image side of one checkpoint."""

    family: str
    """model_type of the checkpoint."""
    tower: FixedGridConfig | PackedConfig
    projector: MergeConfig | PoolConfig
    deepstack: tuple[MergeConfig, ...] = ()
    """One merger per entry of the tower's deepstack_layers."""
    tiles: TilesConfig | None = None
