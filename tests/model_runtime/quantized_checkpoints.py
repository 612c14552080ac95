"""Makes tiny checkpoints in the formats of other tools. What packs is written apart from what reads, slow and plain, as
the formats' papers and tools describe it.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.checkpoints import make_checkpoint

SIZES: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SMALLER = 0.25
"""Weights by which a matrix of this width neither lets its input grow nor what was rounded in it: about 1 / sqrt(K)."""
Stored = tuple[dict[str, Tensor], Tensor]
"""Tensors of a module by the endings of their keys, and the matrix that they stand for."""


def make_quantized(
    folder: Path,
    store: Callable[[str, Tensor], Stored | None],
    quantization_config: dict[str, object],
    overrides: dict[str, object] | None = None,
) -> PreTrainedModel:
    """A model of which `store` is given name and weight [N, K] of every linear module, and says how that is kept; None:
    as it is. What is returned has the numbers that are stored."""
    model = make_checkpoint(folder, "llama", SIZES | (overrides or {}))
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            stored = store(name, module.weight.detach() * SMALLER)
            if stored is not None:
                del tensors[f"{name}.weight"]
                tensors |= {f"{name}.{ending}": tensor.contiguous() for ending, tensor in stored[0].items()}
                module.weight.data.copy_(stored[1])
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config}))
    return model


def fp8_blocks(weight: Tensor, block: tuple[int, int], ending: str = "weight_scale_inv") -> Stored:
    """E4M3 with a scale for each block of rows and columns."""
    numbers, expanded = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    rows, columns = (size or count for size, count in zip(block, weight.shape, strict=True))
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[place].abs().max() / 448
            numbers[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            expanded[place] = numbers[place].float() * scales[i, j]
    return {"weight": numbers, ending: scales}, expanded


def grouped(weight: Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    """Codes [N, K] from 0, scales [N, G], zero points [N, G], and the matrix that they stand for. The last group may be
    short."""
    rows, columns = weight.shape
    whole = torch.nn.functional.pad(weight, (0, -columns % (group or columns)))
    blocks = whole.view(rows, -1, group or columns)
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scales = blocks.abs().amax(-1) / (middle - 1)
        zeros = torch.full_like(scales, middle)
    else:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scales = (high - low) / most
        zeros = (-low / scales).round()
    scales = scales.to(dtype)
    codes = (blocks / scales.float()[..., None] + zeros[..., None]).round().clamp(0, most)
    expanded = ((codes - zeros[..., None]) * scales.float()[..., None]).view(whole.shape)
    return [codes.int().view(whole.shape)[:, :columns], scales, zeros.int(), expanded[:, :columns]]


def words_of(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 along the last dimension, `order` says which of the neighbours comes at which place, lowest first."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_word)).long()
    words = torch.zeros(*padded.shape[:-1], padded.shape[-1] // per_word, dtype=torch.long)
    for place in range(per_word):
        words |= padded[..., place if order is None else order[place] :: per_word] << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def packed(weight: Tensor, bits: int, group: int, symmetric: bool) -> Stored:
    """compressed-tensors, pack-quantized."""
    codes, scales, zeros, expanded = grouped(weight, bits, group, symmetric, torch.bfloat16)
    tensors = {
        "weight_packed": words_of(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors | ({} if symmetric else {"weight_zero_point": words_of(zeros.T, bits).T}), expanded


def plain_integers(weight: Tensor, group: int, symmetric: bool) -> Stored:
    """compressed-tensors, int-quantized."""
    codes, scales, zeros, expanded = grouped(weight, 8, group, symmetric, torch.float32)
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
    return tensors | ({} if symmetric else {"weight_zero_point": (zeros - 128).to(torch.int8)}), expanded


def awq(weight: Tensor, group: int) -> Stored:
    """AutoAWQ, gemm."""
    codes, scales, zeros, expanded = grouped(weight, 4, group, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words_of(codes.T, 4, order), "qzeros": words_of(zeros.T, 4, order), "scales": scales.T}
    return tensors, expanded


def gptq(weight: Tensor, bits: int, group: int, symmetric: bool, version: int, order: Tensor | None = None) -> Stored:
    """Groups are of columns in `order`, which is what desc_act means."""
    columns = torch.arange(weight.shape[1]) if order is None else order
    codes, scales, zeros, expanded = grouped(weight[:, columns], bits, group, symmetric)
    back = columns.argsort()
    group_of = (torch.arange(weight.shape[1]) // (group or weight.shape[1]))[back]
    stored_zeros = (zeros - int(version == 1)) % 2**bits
    tensors = {
        "qweight": words_of(codes[:, back], bits).T,
        "qzeros": words_of(stored_zeros.T, bits),
        "scales": scales.T,
        "g_idx": group_of.int(),
    }
    return tensors, expanded[:, back]


def mxfp4(weight: Tensor) -> Stored:
    """compressed-tensors, mxfp4-pack-quantized: the nearest of sixteen numbers times a power of two."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    blocks = weight.view(weight.shape[0], -1, 32)
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    scaled = blocks / 2.0 ** exponents[..., None]
    places = (scaled.abs()[..., None] - numbers).abs().argmin(-1)
    expanded = numbers[places] * scaled.sign() * 2.0 ** exponents[..., None]
    codes = (places + 8 * (scaled < 0)).view(weight.shape).to(torch.uint8)
    tensors = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": (exponents + 127).to(torch.uint8)}
    return tensors, expanded.view(weight.shape)
