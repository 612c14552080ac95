"""Expands GGUF's block formats to float32, bit for bit as ggml defines them. Used by `gguf_source.py`, engine process.

Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A block holds 32 numbers: a float16 scale, for
Q4_1 also a float16 minimum, then 8-bit numbers, or 4-bit ones of which the low halves of the bytes come first.

Legend: B blocks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_file import GGML_TYPES


def _float16(bytes_B2: Tensor) -> Tensor:
    return bytes_B2.view(torch.float16).float()


def _nibbles(bytes_B16: Tensor, out_B32: Tensor) -> None:
    out_B32[:, :16].copy_(bytes_B16 & 15)
    out_B32[:, 16:].copy_(bytes_B16 >> 4)


def _q4_0(raw_B18: Tensor, out_B32: Tensor) -> None:
    _nibbles(raw_B18[:, 2:], out_B32)
    out_B32.sub_(8).mul_(_float16(raw_B18[:, :2]))


def _q4_1(raw_B20: Tensor, out_B32: Tensor) -> None:
    _nibbles(raw_B20[:, 4:], out_B32)
    out_B32.mul_(_float16(raw_B20[:, :2])).add_(_float16(raw_B20[:, 2:4]))


def _q8_0(raw_B34: Tensor, out_B32: Tensor) -> None:
    out_B32.copy_(raw_B34[:, 2:].view(torch.int8)).mul_(_float16(raw_B34[:, :2]))


_BLOCKS: dict[str, Callable[[Tensor, Tensor], None]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def plain_dtype(type_id: int) -> torch.dtype:
    """The dtype that tensors of a ggml type are read as: their own if torch has it, else float32."""
    return _PLAIN.get(GGML_TYPES[type_id].name, torch.float32)


def _with_gguf_package(raw: Tensor, type_id: int) -> Tensor:
    name = GGML_TYPES[type_id].name
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as gguf_dequantize
    except ImportError:
        raise CheckpointError(
            f"tensors of type {name} need the optional package gguf: pip install 'firstlight[gguf]'"
        ) from None
    try:
        return torch.from_numpy(gguf_dequantize(raw.numpy(), GGMLQuantizationType(type_id)))
    except NotImplementedError:
        raise CheckpointError(f"tensors of type {name} are not supported") from None


def dequantize(raw: Tensor, type_id: int, target: Tensor) -> None:
    """Expand the bytes (uint8, flat) of a tensor into a contiguous target of its shape.

    Raises CheckpointError for a type that neither this file nor the optional package knows.
    """
    stored = GGML_TYPES[type_id]
    if stored.name in _PLAIN:
        target.view(-1).copy_(raw.view(_PLAIN[stored.name]))
    elif stored.name in _BLOCKS:
        _BLOCKS[stored.name](raw.view(-1, stored.num_bytes), target.view(-1, stored.elements))
    else:
        target.view(-1).copy_(_with_gguf_package(raw, type_id).view(-1))
