"""Expands GGUF's types to float32, bit for bit as ggml defines them. Used by `gguf_source.py`, engine process."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from model_runtime.quantized import QuantizedFormat, expand_blocks
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_file import GGML_TYPES

BLOCK_FORMATS: Mapping[str, QuantizedFormat] = MappingProxyType(
    {"Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1", "MXFP4": "mxfp4", "Q4_K": "q4_k", "Q6_K": "q6_k"}
)
"""ggml's names of the types whose integers are kept as they are."""
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
    elif stored.name in BLOCK_FORMATS:
        blocks = raw.view(-1, stored.num_bytes)
        expand_blocks(BLOCK_FORMATS[stored.name], blocks, target.view(-1, stored.elements))
    else:
        target.view(-1).copy_(_with_gguf_package(raw, type_id).view(-1))
