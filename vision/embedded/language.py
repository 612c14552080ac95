"""The embedded language model for training: frozen weights in bfloat16, trainable rank-r changes of the attention.

Used by the alignment, in its process. The runtime's own model computes in place and keeps nothing for gradients.
Shapes: B sequences, T tokens, W width, H heads, D channels of a head, R rank.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_runtime.weights.gguf_config import read_gguf_config
from model_runtime.weights.gguf_file import read_gguf
from model_runtime.weights.gguf_source import gguf_tensors
from model_runtime.weights.source import read, whole
from server.embedded import embedded_path

CHANNELS = 64
"""Of a head."""
EPS, THETA = 1e-5, 100_000.0
RANK, ALPHA = 16, 32.0
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")


def read_weights() -> dict[str, Tensor]:
    """The embedded model's, expanded, under Hugging Face's names."""
    file = read_gguf(embedded_path())
    stored = gguf_tensors(file, read_gguf_config(file))
    return {key: read(tensor, whole(tensor.shape)) for key, tensor in sorted(stored.items())}


class Adapter(nn.Module):
    """x to x A^T B^T, zero at first. The layers compute it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(RANK, inputs) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(outputs, RANK))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """x [B, H, T, D]; cosines and sines [B, 1, T, D/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1).to(x.dtype)


def layer_outputs(
    x: Tensor,
    weights: Mapping[str, Tensor],
    changes: Mapping[str, tuple[Tensor, Tensor]],
    rotations: tuple[Tensor, Tensor],
    unseen: Tensor,
) -> Tensor:
    """x [B, T, W] through one layer, which has no state, so that it can be compiled once for all.

    unseen [B, 1, T, T] is -inf where nothing is seen, else 0; `changes` has A [R, inputs] and B [outputs, R].
    """

    def project(x: Tensor, name: str) -> Tensor:
        a, b = changes[name]
        return F.linear(x, weights[f"self_attn.{name}.weight"]) + F.linear(F.linear(x, a), b) * (ALPHA / RANK)

    batch, length, _ = x.shape
    normed = _norm(x, weights["input_layernorm.weight"].float())
    q, k, v = (project(normed, name).view(batch, length, -1, CHANNELS).transpose(1, 2) for name in ADAPTED[:3])
    q, k = _rotate(q, *rotations), _rotate(k, *rotations)
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    scores = (q * CHANNELS**-0.5) @ k.transpose(-1, -2)
    seen = torch.softmax(scores + unseen, dim=-1, dtype=torch.float32).to(v.dtype) @ v
    x = x + project(seen.transpose(1, 2).reshape(batch, length, -1), "o_proj")
    normed = _norm(x, weights["post_attention_layernorm.weight"].float())
    gate, up = (F.linear(normed, weights[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return x + F.linear(F.silu(gate) * up, weights["mlp.down_proj.weight"])


class Language(nn.Module):
    """SmolLM2 with adapters. `forward` takes embeddings, so that pictures can be among them."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__()
        self._frozen = {name: value.to(device, torch.bfloat16) for name, value in weights.items()}
        layers = sum(name.endswith(".input_layernorm.weight") for name in weights)
        self._layers = [self._layer(f"model.layers.{layer}.") for layer in range(layers)]
        self.adapters = nn.ModuleDict()
        for layer in range(layers):
            for name in ADAPTED:
                outputs, inputs = weights[f"model.layers.{layer}.self_attn.{name}.weight"].shape
                self.adapters[f"{layer}_{name}"] = Adapter(inputs, outputs)
        self.adapters.to(device)
        self._run_layer: Callable[..., Tensor] = layer_outputs

    def compile_layers(self) -> None:
        """One program for all layers and all lengths."""
        self._run_layer = torch.compile(layer_outputs, dynamic=True)

    def embed(self, ids: Tensor) -> Tensor:
        """[...] to [..., W] float32."""
        table = self._frozen["model.embed_tokens.weight"]
        return F.embedding(ids.to(table.device), table).float()

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Embeddings [B, T, W], positions [B, T], mask [B, T, T] (true: seen) to hidden states [B, T, W]."""
        frequencies = THETA ** (-torch.arange(0, CHANNELS, 2, device=x.device, dtype=torch.float32) / CHANNELS)
        angles = positions[:, None, :, None].float() * frequencies
        rotations = angles.cos(), angles.sin()
        unseen = torch.zeros(mask.shape, device=x.device).masked_fill(~mask, -torch.inf)[:, None]
        with torch.autocast(x.device.type, torch.bfloat16):
            for layer, matrices in enumerate(self._layers):
                x = self._run_layer(x, matrices, self._changes(layer), rotations, unseen)
        return _norm(x, self._frozen["model.norm.weight"].float())

    def _layer(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): value for name, value in self._frozen.items() if name.startswith(prefix)}

    def _changes(self, layer: int) -> dict[str, tuple[Tensor, Tensor]]:
        adapters = {name: self.adapters[f"{layer}_{name}"] for name in ADAPTED}
        return {name: (one.a, one.b) for name, one in adapters.items() if isinstance(one, Adapter)}

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, W] to [N, vocabulary] float32."""
        return F.linear(hidden.to(torch.bfloat16), self._frozen["model.embed_tokens.weight"]).float()
