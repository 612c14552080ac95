"""Reads the quantization_config of a config.json: how the matrices of which modules are stored. What is not known is
refused by name. Called by `checkpoint.py` and `hf_config.py` in the engine process; does not import torch.

Methods: fp8 as DeepSeek-V3 and Qwen3 have it, compressed-tensors
(https://github.com/vllm-project/compressed-tensors), AWQ (arXiv 2306.00978), GPTQ (arXiv 2210.17323), GPT-OSS's mxfp4.
What these say about activations is not needed: rows are computed in more bits here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from model_runtime.hf_values import Json, fail, flag, integer, mapping
from model_runtime.weights.errors import CheckpointError

Layout = Literal["fp8", "int8", "packed", "mxfp4", "awq", "gptq"]
"""How a module's tensors are called and laid out; see `weights/scaled.py` and `weights/integers.py`."""
WHERE = "quantization_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixScheme:
    """How a matrix [N, K] is stored."""

    layout: Layout
    bits: int
    block: tuple[int, int]
    """Neighbouring rows and columns that share a scale; 0: all of them."""
    symmetric: bool = True
    """Integers have no zero points."""
    zero_offset: int = 0
    """What has to be added to a stored zero point."""
    any_order: bool = False
    """Columns that share a scale may stand anywhere in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Of a checkpoint."""

    groups: tuple[tuple[tuple[str, ...], MatrixScheme], ...]
    """(names of modules, how they are stored); names as compressed-tensors has them: of a module, of the last part of
    it, `re:` and a pattern of its beginning, or the class Linear."""
    ignored: tuple[str, ...] = ()
    """Such names of modules whose matrices are floats."""

    def of(self, module: str) -> MatrixScheme | None:
        """How a module is stored that is not ignored."""
        if any(_names(name, module) for name in self.ignored):
            return None
        exact = [scheme for names, scheme in self.groups if any(_names(name, module) for name in names)]
        every = [scheme for names, scheme in self.groups if "Linear" in names]
        return (*exact, *every, None)[0]


def _names(name: str, module: str) -> bool:
    if name.startswith("re:"):
        return re.match(name.removeprefix("re:"), module) is not None
    return module == name or module.endswith(f".{name}") or module.startswith(f"{name}.")


def read_quantization(config: Json) -> Quantization | None:
    """What a config.json, or the text_config in it, says; None: it has only floats, or GPT-OSS's stacks of experts.
    Raises CheckpointError naming what is not supported."""
    found = config.get(WHERE)
    if found is None and isinstance(config.get("text_config"), Mapping):
        found = mapping(config, "text_config").get(WHERE)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        fail(WHERE, found, "an object")
    method = found.get("quant_method")
    if method == "mxfp4":
        return None
    readers = {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq}
    if not isinstance(method, str) or method not in readers:
        fail(f"{WHERE}.quant_method", method, f"one of mxfp4, {', '.join(readers)}")
    return readers[method](found)


def is_mxfp4(config: Json) -> bool:
    """Whether experts are in the stacks that `weights/stacks.py` reads."""
    how = config.get(WHERE)
    return isinstance(how, Mapping) and how.get("quant_method") == "mxfp4"


def _check(where: str, found: Json, known: Mapping[str, object]) -> None:
    """Raises CheckpointError for a key that is not known, or has none of the values that are listed for it."""
    for key, value in found.items():
        if key not in known:
            raise CheckpointError(f"config.json: {where}.{key} ({value!r}) is not known, and may change the numbers")
        allowed = known[key]
        if isinstance(allowed, tuple) and value not in allowed:
            fail(f"{where}.{key}", value, " or ".join(map(repr, allowed)))


def _strings(where: str, found: Json, *keys: str) -> tuple[str, ...]:
    values: list[str] = []
    for key in keys:
        value = found.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            fail(f"{where}.{key}", value, "a list of names")
        values += value
    for name in values:
        if name.startswith("re:"):
            try:
                re.compile(name.removeprefix("re:"))
            except re.error:
                fail(where, name, "a pattern")
    return tuple(values)


def _block(where: str, value: object) -> tuple[int, int]:
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    fail(where, value, "two positive numbers")


_FP8: Mapping[str, object] = MappingProxyType(
    {
        "quant_method": ("fp8",),
        "fmt": ("e4m3", None),
        "activation_scheme": ("dynamic", "static"),
        "weight_block_size": ...,
        "modules_to_not_convert": ...,
        "ignored_layers": ...,
        "scale_fmt": ("ue8m0", "float", None),
        "is_checkpoint_fp8_serialized": (True,),
        "dequantize": (False,),
        "kv_cache_scheme": ...,
    }
)


def _fp8(found: Json) -> Quantization:
    _check(WHERE, found, _FP8)
    size = found.get("weight_block_size")
    block = (0, 0) if size is None else _block(f"{WHERE}.weight_block_size", size)
    ignored = _strings(WHERE, found, "modules_to_not_convert", "ignored_layers")
    return Quantization(groups=((("Linear",), MatrixScheme(layout="fp8", bits=8, block=block)),), ignored=ignored)


_AWQ: Mapping[str, object] = MappingProxyType(
    {
        "quant_method": ("awq",),
        "bits": (4,),
        "w_bit": (4,),
        "group_size": ...,
        "q_group_size": ...,
        "zero_point": (True,),
        "version": ("gemm", "GEMM"),
        "backend": ("autoawq", None),
        "modules_to_not_convert": ...,
        "do_fuse": (False, None),
        "fuse_max_seq_len": ...,
        "modules_to_fuse": (None,),
        "exllama_config": ...,
    }
)


def _group_size(found: Json, key: str) -> int:
    """0: a whole row."""
    return 0 if found.get(key) == -1 else integer(found, key)


def _awq(found: Json) -> Quantization:
    _check(WHERE, found, _AWQ)
    group = _group_size(found, "q_group_size" if "q_group_size" in found else "group_size")
    scheme = MatrixScheme(layout="awq", bits=4, block=(1, group), symmetric=False)
    return Quantization(groups=((("Linear",), scheme),), ignored=_strings(WHERE, found, "modules_to_not_convert"))


_GPTQ: Mapping[str, object] = MappingProxyType(
    {
        "quant_method": ("gptq",),
        "bits": (4, 8),
        "group_size": ...,
        "desc_act": (True, False),
        "sym": (True, False),
        "checkpoint_format": ("gptq", "gptq_v2", "", None),
        "lm_head": (True, False),
        "dynamic": (None, {}),
        "pack_dtype": ("int32",),
        "modules_in_block_to_quantize": ...,
        **dict.fromkeys(("static_groups", "true_sequential", "damp_percent", "damp_auto_increment", "dataset"), ...),
        **dict.fromkeys(("model_name_or_path", "model_file_base_name", "model_seqlen", "block_name_to_quantize"), ...),
        **dict.fromkeys(("module_name_preceding_first_block", "batch_size", "pad_token_id", "tokenizer", "meta"), ...),
        **dict.fromkeys(("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config"), ...),
        **dict.fromkeys(("max_input_length", "backend", "cache_block_outputs", "quantizer", "version", "hyb_act"), ...),
        "is_marlin_format": (False, None),
    }
)
"""What GPTQ did to make the file does not change what the file says."""


def _gptq(found: Json) -> Quantization:
    _check(WHERE, found, _GPTQ)
    is_second = found.get("checkpoint_format") == "gptq_v2"
    scheme = MatrixScheme(
        layout="gptq",
        bits=integer(found, "bits"),
        block=(1, _group_size(found, "group_size")),
        symmetric=flag({"sym": True, **found}, "sym"),
        zero_offset=0 if is_second else 1,
        any_order=flag({"desc_act": False, **found}, "desc_act"),
    )
    return Quantization(groups=((("Linear",), scheme),))


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


def _compressed_tensors(found: Json) -> Quantization:
    _check(WHERE, found, _COMPRESSED)
    groups = []
    for name, group in mapping(found, "config_groups").items():
        if not isinstance(group, Mapping):
            fail(f"{WHERE}.config_groups.{name}", group, "an object")
        groups.append(_compressed_group(f"{WHERE}.config_groups.{name}", group, found.get("format")))
    return Quantization(groups=tuple(groups), ignored=_strings(WHERE, found, "ignore"))


def _compressed_group(where: str, group: Json, usual: object) -> tuple[tuple[str, ...], MatrixScheme]:
    _check(where, group, _GROUP)
    weights = mapping(group, "weights")
    _check(f"{where}.weights", weights, _WEIGHTS)
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
            block = _block(f"{where}.weights.block_structure", weights.get("block_structure"))
        case _:
            block = (1, integer(weights, "group_size"))
    symmetric = flag({"symmetric": True, **weights}, "symmetric")
    any_order = weights.get("actorder") in ("group", "dynamic")
    bits = int(str(kind[2]))
    scheme = MatrixScheme(layout=layout, bits=bits, block=block, symmetric=symmetric, any_order=any_order)
    return _strings(f"{where}.targets", group, "targets"), scheme
