"""Reads the quantization_config of a config.json: how the matrices of which modules are stored. What is not known is
refused by name. Called by `opening.py` and `hf/config.py`, engine and worker processes; does not import torch.

Methods: fp8 as DeepSeek-V3 and Qwen3 have it, compressed-tensors, AWQ (arXiv 2306.00978), GPTQ (arXiv 2210.17323),
GPT-OSS's mxfp4. What these say about activations is not needed: rows are computed in more bits here.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from model_runtime.hf.compressed import compressed_tensors
from model_runtime.hf.values import Json, block_size, check_known, fail, flag, integer, mapping, strings
from model_runtime.matrix_scheme import MatrixScheme, Quantization

WHERE = "quantization_config"


def read_quantization(config: Json) -> Quantization | None:
    """What a config.json, or the text_config in it, says; None: it has only floats. Raises CheckpointError naming what
    is not supported."""
    found = config.get(WHERE)
    if found is None and isinstance(config.get("text_config"), Mapping):
        found = mapping(config, "text_config").get(WHERE)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        fail(WHERE, found, "an object")
    method = found.get("quant_method")
    readers: Mapping[str, Callable[[Json], Quantization]] = {
        "mxfp4": _mxfp4,
        "fp8": _fp8,
        "compressed-tensors": partial(compressed_tensors, WHERE),
        "awq": _awq,
        "gptq": _gptq,
    }
    if not isinstance(method, str) or method not in readers:
        fail(f"{WHERE}.quant_method", method, f"one of {', '.join(readers)}")
    return readers[method](found)


def is_mxfp4(config: Json) -> bool:
    """Whether experts are in the stacks that `weights/stacks.py` reads."""
    how = config.get(WHERE)
    return isinstance(how, Mapping) and how.get("quant_method") == "mxfp4"


_MXFP4: Mapping[str, object] = MappingProxyType(
    {"quant_method": ("mxfp4",), "modules_to_not_convert": ..., "dequantize": (False,), "swizzle": (True, False)}
)
MXFP4_BLOCK = 32


def _mxfp4(found: Json) -> Quantization:
    """Experts alone, whose stacks are taken apart before anybody asks for them by name."""
    check_known(WHERE, found, _MXFP4)
    scheme = MatrixScheme(layout="mxfp4", bits=4, block=(1, MXFP4_BLOCK))
    return Quantization(groups=((("re:.*\\.experts\\.",), scheme),))


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
    check_known(WHERE, found, _FP8)
    size = found.get("weight_block_size")
    block = (0, 0) if size is None else block_size(f"{WHERE}.weight_block_size", size)
    ignored = strings(WHERE, found, "modules_to_not_convert", "ignored_layers")
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
    check_known(WHERE, found, _AWQ)
    group = _group_size(found, "q_group_size" if "q_group_size" in found else "group_size")
    scheme = MatrixScheme(layout="awq", bits=4, block=(1, group), symmetric=False)
    return Quantization(groups=((("Linear",), scheme),), ignored=strings(WHERE, found, "modules_to_not_convert"))


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
    check_known(WHERE, found, _GPTQ)
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
