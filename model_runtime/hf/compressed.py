"""Reads the quantization_config of compressed-tensors (https://github.com/vllm-project/compressed-tensors). Called by
`hf/quantization.py`, engine and worker processes; does not import torch.
"""

from collections.abc import Mapping
from types import MappingProxyType

from model_runtime.hf.values import Json, block_size, check_known, fail, flag, integer, mapping, strings
from model_runtime.matrix_scheme import Layout, MatrixScheme, Quantization
from model_runtime.weights.errors import CheckpointError

_COMPRESSED: Mapping[str, object] = MappingProxyType(
    {
        "quant_method": ("compressed-tensors",),
        "format": ...,
        "config_groups": ...,
        "ignore": ...,
        "kv_cache_scheme": ...,
        "quantization_status": ("compressed", "frozen"),
        "global_compression_ratio": ...,
        "sparsity_config": (None, {}),
        "transform_config": (None, {}),
        "version": ...,
    }
)
_GROUP: Mapping[str, object] = MappingProxyType(
    {"targets": ..., "weights": ..., "input_activations": ..., "output_activations": ..., "format": ...}
)
_WEIGHTS: Mapping[str, object] = MappingProxyType(
    {
        "num_bits": (4, 8),
        "type": ("int", "float"),
        "symmetric": (True, False),
        "strategy": ("tensor", "channel", "group", "block"),
        "group_size": ...,
        "block_structure": ...,
        "dynamic": (False,),
        "actorder": (None, "static", "weight", "group", "dynamic"),
        "observer": ...,
        "observer_kwargs": ...,
        "scale_dtype": ...,
        "zp_dtype": ...,
    }
)
_LAYOUTS: Mapping[tuple[str, str, int], Layout] = MappingProxyType(
    {
        ("pack-quantized", "int", 4): "packed",
        ("pack-quantized", "int", 8): "packed",
        ("int-quantized", "int", 8): "int8",
        ("naive-quantized", "int", 8): "int8",
        ("naive-quantized", "float", 8): "fp8",
        ("float-quantized", "float", 8): "fp8",
        ("mxfp4-pack-quantized", "float", 4): "mxfp4",
    }
)
"""By format, type and bits."""


def compressed_tensors(where: str, found: Json) -> Quantization:
    """Raises CheckpointError naming what is not supported."""
    check_known(where, found, _COMPRESSED)
    groups = []
    for name, group in mapping(found, "config_groups").items():
        if not isinstance(group, Mapping):
            fail(f"{where}.config_groups.{name}", group, "an object")
        groups.append(_compressed_group(f"{where}.config_groups.{name}", group, found.get("format")))
    return Quantization(groups=tuple(groups), ignored=strings(where, found, "ignore"))


def _compressed_group(where: str, group: Json, usual: object) -> tuple[tuple[str, ...], MatrixScheme]:
    check_known(where, group, _GROUP)
    weights = mapping(group, "weights")
    check_known(f"{where}.weights", weights, _WEIGHTS)
    form = usual if group.get("format") is None else group["format"]
    kind = (form, weights.get("type", "int"), weights.get("num_bits", 8))
    layout = next((layout for known, layout in _LAYOUTS.items() if known == kind), None)
    if layout is None:
        known = "; ".join(f"{form} of {kind}, {bits} bits" for form, kind, bits in _LAYOUTS)
        raise CheckpointError(f"config.json: {where}: {kind[0]} of {kind[1]}, {kind[2]} bits; supported are {known}")
    match weights.get("strategy"):
        case "tensor":
            block = (0, 0)
        case "channel":
            block = (1, 0)
        case "block":
            block = block_size(f"{where}.weights.block_structure", weights.get("block_structure"))
        case _:
            block = (1, integer(weights, "group_size"))
    symmetric = flag({"symmetric": True, **weights}, "symmetric")
    any_order = weights.get("actorder") in ("group", "dynamic")
    bits = int(str(kind[2]))
    scheme = MatrixScheme(layout=layout, bits=bits, block=block, symmetric=symmetric, any_order=any_order)
    return strings(f"{where}.targets", group, "targets"), scheme
