"""The embedded language model for training: frozen weights in bfloat16, trainable rank-r changes of the attention.

Used by the alignment, in its process. The runtime's own model computes in place and keeps nothing for gradients.
Shapes: B sequences, T tokens, W width, H heads, D channels of a head, R rank.
"""

from collections.abc import Mapping

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
    """x to x A^T B^T, zero at first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(RANK, inputs) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(outputs, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]"""
        return F.linear(F.linear(x, self.a), self.b) * (ALPHA / RANK)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """x [B, H, T, D]; cosines and sines [B, 1, T, D/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1).to(x.dtype)


class Language(nn.Module):
    """SmolLM2 with adapters. `forward` takes embeddings, so that pictures can be among them."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__()
        self._frozen = {name: value.to(device, torch.bfloat16) for name, value in weights.items()}
        self._layers = sum(name.endswith(".input_layernorm.weight") for name in weights)
        self.adapters = nn.ModuleDict()
        for layer in range(self._layers):
            for name in ADAPTED:
                outputs, inputs = weights[f"model.layers.{layer}.self_attn.{name}.weight"].shape
                self.adapters[f"{layer}_{name}"] = Adapter(inputs, outputs)
        self.adapters.to(device)

    def embed(self, ids: Tensor) -> Tensor:
        """[...] to [..., W] float32."""
        table = self._frozen["model.embed_tokens.weight"]
        return F.embedding(ids.to(table.device), table).float()

    def _project(self, x: Tensor, layer: int, name: str) -> Tensor:
        plain = F.linear(x, self._frozen[f"model.layers.{layer}.self_attn.{name}.weight"])
        changed: Tensor = plain + self.adapters[f"{layer}_{name}"](x)
        return changed

    def _attend(self, x: Tensor, layer: int, rotations: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            self._project(x, layer, name).view(batch, length, -1, CHANNELS).transpose(1, 2) for name in ADAPTED[:3]
        )
        q, k = _rotate(q, *rotations), _rotate(k, *rotations)
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        seen = F.scaled_dot_product_attention(q, k.to(v.dtype), v, attn_mask=mask)
        return self._project(seen.transpose(1, 2).reshape(batch, length, -1), layer, "o_proj")

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Embeddings [B, T, W], positions [B, T], mask [B, T, T] (true: seen) to hidden states [B, T, W]."""
        frequencies = THETA ** (-torch.arange(0, CHANNELS, 2, device=x.device, dtype=torch.float32) / CHANNELS)
        angles = positions[:, None, :, None].float() * frequencies
        rotations = angles.cos(), angles.sin()
        with torch.autocast(x.device.type, torch.bfloat16):
            for layer in range(self._layers):
                prefix = f"model.layers.{layer}."
                normed = _norm(x, self._frozen[prefix + "input_layernorm.weight"].float())
                x = x + self._attend(normed, layer, rotations, mask[:, None])
                normed = _norm(x, self._frozen[prefix + "post_attention_layernorm.weight"].float())
                gate, up = (
                    F.linear(normed, self._frozen[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up")
                )
                x = x + F.linear(F.silu(gate) * up, self._frozen[prefix + "mlp.down_proj.weight"])
        return _norm(x, self._frozen["model.norm.weight"].float())

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, W] to [N, vocabulary] float32."""
        return F.linear(hidden.to(torch.bfloat16), self._frozen["model.embed_tokens.weight"]).float()
