"""Quantised matrices of a safetensors checkpoint, each as one tensor under the key that its floats would have. Used by
`opening.py`, engine and worker processes.
"""

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from model_runtime.matrix_scheme import Layout, MatrixScheme, Quantization
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.integers import compressed_integers, turned_integers
from model_runtime.weights.mxfp4 import compressed_mxfp4
from model_runtime.weights.scaled import SCALES, ScaledFloats
from model_runtime.weights.source import LastRead, StoredTensor, TensorSource

logger = logging.getLogger(__name__)

_MAKE: Mapping[Layout, Callable[[str, TensorSource, MatrixScheme], StoredTensor]] = MappingProxyType(
    {
        "fp8": ScaledFloats,
        "int8": compressed_integers,
        "packed": compressed_integers,
        "mxfp4": compressed_mxfp4,
    }
)
"""Those of GPTQ and AWQ are made of what was read last, too."""
_BESIDE = (
    *(*SCALES, "input_scale", "output_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("qzeros", "scales", "g_idx"),
)
"""What a module may have beside its numbers; scales of activations are not needed."""
_OF_A_CACHE = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")
"""Scales for a KV cache of 8 bits, which these engines keep in other types."""
_NUMBERS: Mapping[Layout, tuple[str, torch.dtype]] = MappingProxyType(
    {
        "fp8": (".weight", torch.float8_e4m3fn),
        "int8": (".weight", torch.int8),
        "packed": (".weight_packed", torch.int32),
        "mxfp4": (".weight_packed", torch.uint8),
        "gptq": (".qweight", torch.int32),
        "awq": (".qweight", torch.int32),
    }
)
"""Endings of the numbers' keys, and their types."""
_ENDINGS = tuple(sorted({ending for ending, _ in _NUMBERS.values()}))


def matrices_of(source: TensorSource, quantization: Quantization | None) -> TensorSource:
    """The tensors of a checkpoint, those of a quantised module as one. Raises CheckpointError where what is stored
    contradicts what config.json says."""
    if quantization is None:
        return source
    found: dict[str, StoredTensor] = {}
    used: set[str] = set()
    last = LastRead()
    for key in sorted(source):
        ending = next((end for end in _ENDINGS if key.endswith(end) and not _are_floats(source[key])), None)
        if ending is None:
            continue
        module = key.removesuffix(ending)
        found[f"{module}.weight"] = _matrix(module, ending, source, quantization, last)
        used |= {key, *(f"{module}.{name}" for name in _BESIDE)}
    if expanded := sum(tensor.format is None for tensor in found.values()):
        logger.warning(
            "%d of %d quantised matrices are expanded to 16 bits a number: columns are no whole blocks of a format "
            "that is kept, or those with a scale in common stand apart, or there are zero points of 8 bits",
            *(expanded, len(found)),
        )
    rest = {key: source[key] for key in source if key not in used and not key.endswith(_OF_A_CACHE)}
    return rest | found


def _are_floats(tensor: StoredTensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1


def _matrix(module: str, ending: str, source: TensorSource, quantization: Quantization, last: LastRead) -> StoredTensor:
    scheme = quantization.of(module)
    dtype, shape = source[module + ending].dtype, source[module + ending].shape
    if len(shape) != 2:
        raise CheckpointError(f"{module}{ending} has shape {list(shape)}, which is no matrix")
    if scheme is None or (ending, dtype) != _NUMBERS[scheme.layout]:
        said, stored = "floats" if scheme is None else scheme.layout, str(dtype).removeprefix("torch.")
        raise CheckpointError(f"{module}{ending} is stored as {stored}; config.json says {said} of it")
    if scheme.layout in ("gptq", "awq"):
        return turned_integers(module, source, scheme, last)
    return _MAKE[scheme.layout](module, source, scheme)
