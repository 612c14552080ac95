"""The tower to be trained: SigLIP's ViT with the parameter names of Hugging Face, less what LLaVA does not use of it.

Built by the training, in its process. Shapes: B pictures, P patches, W width, H heads, D channels of a head.

It does not start from noise alone. Of each patch the first channels say its row and its column, the others its
principal components; and in the first layers every head looks at one of the eight neighbours. So it begins as
something like a convolution, which small towers otherwise take most of their training to become.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NEIGHBOURS = ((-1, -1), (-1, 0), (-1, 1), (0, -1), (0, 1), (1, -1), (1, 0), (1, 1))
"""(rows, columns) away, one for each head."""
PLACE = 4.0
"""What the channel of a patch's row, and that of its column, holds at first; enough to be seen beside any picture."""
SHARPNESS = 0.14
"""Of the first scores: about 3 for the right row on a full patch, 16 on an empty one, whose norm enlarges more."""
MEAN, STD = 0.5, 0.5
"""Of the SigLIP processor, for pixels from 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """Sizes."""

    side: int = 128
    patch: int = 16
    width: int = 256
    layers: int = 6
    heads: int = 8
    local_layers: int = 4
    """How many layers start by looking at neighbours."""

    @property
    def grid(self) -> int:
        """Patches of a side."""
        return self.side // self.patch


class Embeddings(nn.Module):
    """Patches and their places."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, config.width, config.patch, config.patch)
        self.position_embedding = nn.Embedding(config.grid**2, config.width)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, side, side] to [B, P, W]."""
        patches: Tensor = self.patch_embedding(pixels)
        return patches.flatten(2).transpose(1, 2) + self.position_embedding.weight


class Attention(nn.Module):
    """All patches attend to all. For 64 patches plain products are faster on CPU than the fused kernel."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = nn.Linear(config.width, config.width)
        self.k_proj = nn.Linear(config.width, config.width)
        self.v_proj = nn.Linear(config.width, config.width)
        self.out_proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, P, W] to the same."""
        batch, patches, width = x.shape
        parts = (self.q_proj, self.k_proj, self.v_proj)
        weight, bias = torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts])
        split = F.linear(x, weight, bias).view(batch, patches, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        seen = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v
        result: Tensor = self.out_proj(seen.transpose(1, 2).reshape(batch, patches, width))
        return result


class Mlp(nn.Module):
    """Four times as wide inside."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, 4 * config.width)
        self.fc2 = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, P, W] to the same."""
        result: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return result


class Layer(nn.Module):
    """Norm first."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.width, eps=1e-6)
        self.self_attn = Attention(config)
        self.layer_norm2 = nn.LayerNorm(config.width, eps=1e-6)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        """[B, P, W] to the same."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """The layers, under the name that checkpoints give them."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))


class Tower(nn.Module):
    """uint8 pictures to a vector for each patch: the last layer's, without a norm, as LLaVA takes it."""

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)

    def forward(self, pictures: Tensor) -> Tensor:
        """[B, side, side, 3] uint8 to [B, P, W]."""
        pixels = (pictures.permute(0, 3, 1, 2).float() / 255 - MEAN) / STD
        x: Tensor = self.embeddings(pixels)
        for layer in self.encoder.layers:
            x = layer(x)
        return x


@torch.no_grad()
def start(tower: Tower, pictures: Tensor) -> None:
    """First values of all parameters, from torch's global generator and from pictures ([B, side, side, 3] uint8)."""
    for name, parameter in tower.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 2:
            nn.init.trunc_normal_(parameter, std=parameter.shape[1] ** -0.5)
    places = 2 * tower.config.grid
    _start_positions(tower, places)
    _start_patches(tower, pictures, places)
    residual = (2 * tower.config.layers) ** -0.5
    for number, layer in enumerate(tower.encoder.layers):
        assert isinstance(layer, Layer)
        layer.self_attn.out_proj.weight.mul_(residual)
        layer.mlp.fc2.weight.mul_(residual)
        if number < tower.config.local_layers:
            _start_local(layer.self_attn, tower.config, places)


def _start_positions(tower: Tower, places: int) -> None:
    """Channels 0 to grid say the row, those to 2 grid the column."""
    grid, table = tower.config.grid, tower.embeddings.position_embedding.weight
    table.normal_(std=0.02)
    table[:, :places] = 0
    numbers = torch.arange(grid * grid)
    table[numbers, numbers // grid] = PLACE
    table[numbers, grid + numbers % grid] = PLACE


def _start_patches(tower: Tower, pictures: Tensor, places: int) -> None:
    """The other channels are principal components, nearly whitened."""
    conv, patch = tower.embeddings.patch_embedding, tower.config.patch
    pixels = (pictures.permute(0, 3, 1, 2).float() / 255 - MEAN) / STD
    rows = F.unfold(pixels, patch, stride=patch).transpose(1, 2).reshape(-1, 3 * patch * patch)
    mean = rows.mean(dim=0)
    variances, directions = torch.linalg.eigh(torch.cov(rows.T))
    count = conv.out_channels - places
    variances, directions = variances[-count:].clamp_min(0).flip(0), directions[:, -count:].flip(1)
    filters = directions / (variances.sqrt() + 0.1)
    conv.weight.zero_()
    conv.weight[places:] = filters.T.reshape(count, 3, patch, patch)
    assert conv.bias is not None
    conv.bias[places:] = -(mean @ filters)


def _start_local(attention: Attention, config: TowerConfig, places: int) -> None:
    """Head h scores the patch that is NEIGHBOURS[h] away highest; the rest of its channels stay noise."""
    size = config.width // config.heads
    assert config.heads == len(NEIGHBOURS) and size >= places, (
        "a head for each neighbour, channels for rows and columns"
    )
    scale = (SHARPNESS * size**0.5) ** 0.5
    for head, (down, right) in enumerate(NEIGHBOURS):
        for axis, step in enumerate((down, right)):
            for place in range(config.grid):
                row = head * size + axis * config.grid + place
                attention.q_proj.weight[row] = 0
                attention.k_proj.weight[row] = 0
                attention.k_proj.weight[row, axis * config.grid + place] = scale
                if 0 <= place - step < config.grid:
                    attention.q_proj.weight[row, axis * config.grid + place - step] = scale
        noise = slice(head * size + places, (head + 1) * size)
        attention.q_proj.weight[noise] *= 0.3
        attention.k_proj.weight[noise] *= 0.3
