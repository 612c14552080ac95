"""Quantised matrices of a safetensors checkpoint, each as one tensor under the key that its floats would have. Used by
`checkpoint.py`, engine and worker processes.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from model_runtime.hf_quantization import Layout, MatrixScheme, Quantization
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.scaled import SCALES, ScaledFloats
from model_runtime.weights.source import StoredTensor, TensorSource

_MAKE: Mapping[Layout, Callable[[str, TensorSource, MatrixScheme], StoredTensor]] = MappingProxyType(
    {"fp8": ScaledFloats}
)
_BESIDE = (*SCALES, "input_scale", "output_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
"""What a module of compressed-tensors or fp8 may have beside its numbers; scales of activations are not needed."""
_OF_A_CACHE = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")
"""Scales for a KV cache of 8 bits, which these engines keep in other types."""
_NUMBERS = {".weight": ("fp8", "int8"), ".weight_packed": ("packed", "mxfp4"), ".qweight": ("awq", "gptq")}
"""Endings of the numbers' keys by layout."""


def matrices_of(source: TensorSource, quantization: Quantization | None) -> TensorSource:
    """The tensors of a checkpoint, those of a quantised module as one. Raises CheckpointError where what is stored
    contradicts what config.json says."""
    if quantization is None:
        return source
    found: dict[str, StoredTensor] = {}
    used: set[str] = set()
    for key in sorted(source):
        ending = next((end for end in _NUMBERS if key.endswith(end) and not _are_floats(source[key])), None)
        if ending is None:
            continue
        module = key.removesuffix(ending)
        found[f"{module}.weight"] = _matrix(module, ending, source, quantization)
        used |= {key, *(f"{module}.{name}" for name in _BESIDE)}
    rest = {key: source[key] for key in source if key not in used and not key.endswith(_OF_A_CACHE)}
    return rest | found


def _are_floats(tensor: StoredTensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1


def _matrix(module: str, ending: str, source: TensorSource, quantization: Quantization) -> StoredTensor:
    scheme = quantization.of(module)
    if scheme is None or scheme.layout not in _NUMBERS[ending]:
        said = "floats" if scheme is None else scheme.layout
        dtype = str(source[module + ending].dtype).removeprefix("torch.")
        raise CheckpointError(f"{module}{ending} is stored as {dtype}; config.json says {said} of it")
    return _MAKE[scheme.layout](module, source, scheme)
