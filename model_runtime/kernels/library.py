"""The C functions of the compiled kernels, typed for ctypes. Loaded once per process by `ops`.

Pointers are the integers of `Tensor.data_ptr()`. The kernels have threads of their own (see pool.h).
The signatures repeat those in the sources; `test_kernels_build.py` compares the two.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model_runtime.kernels.build import BuildError, build

P, N, F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "set_threads": (None, (N,)),
    "pack": (None, (P, P, N, N, N)),
    "linear": (None, (P, P, N, P, P, N, N, N, N)),
    "pack_quantized": (None, (P, P, N, N, N)),
    "quantized_bytes": (N, (N, N, N)),
    "embedding": (N, (P, P, N, N, N, N, P)),
    "norm": (None, (P, P, F, N, N, N, P)),
    "qk_norm": (None, (P, P, P, F, N, N, N, N, N)),
    "silu_mul": (None, (P, N, N, P)),
    "gelu_tanh_mul": (None, (P, N, N, P)),
    "activate": (None, (P, N, N, P)),
    "rope_and_cache": (N, (P, P, P, N, N, N, P, P, P, P, P, P, N, N, N, N, N, N, N)),
    "paged_attention": (N, (P, P, P, P, N, N, P, P, P, P, P, P, N, N, N, N, N, N, N, F, N, F, P)),
    "partial_attention": (N, (P, P, P, P, N, N, P, P, P, P, P, P, P, N, N, N, N, N, N, N, F, F)),
    "merge_attention": (None, (P, N, N, N, P)),
    "short_conv": (N, (P, P, P, P, P, P, N, N, N, N, N, P, P)),
    "delta_rule": (N, (P, P, P, P, P, P, P, N, N, N, N, N, N, N, N, P, P)),
    "linear_heads": (None, (P, N, N, P, N, P, N, N, N, N, N, N)),
    "rope_and_cache_latent": (N, (P, P, P, P, N, N, N, P, P, P, P, N, N, N, N, N, N)),
    "latent_attention": (N, (P, P, P, N, N, P, P, P, P, P, P, N, N, N, N, N, F)),
    "workspace": (N, (P, N, N)),
    "shared_workspace": (N, (P, N, P)),
    "run_layers": (N, (P, P, N, P, P)),
    "join": (N, (P,)),
    "all_reduce": (N, (P, P, N)),
    "exchange": (N, (P, P, P, P, P, P)),
    "send": (N, (P, P, N)),
    "receive": (N, (P, P, N)),
    "sample": (N, (P, N, N, N, P, P, P, P, P, P, P, P, P, P, P, P, P, P, P, P, P, P)),
    "logprobs": (None, (P, N, N, P, P, P, P, P, P, P)),
}
"""Result and argument types of each function `fl_<name>`."""


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded kernels; each field is the C function `fl_<field>`."""

    set_threads: Callable[..., Any]
    pack: Callable[..., Any]
    linear: Callable[..., Any]
    pack_quantized: Callable[..., Any]
    quantized_bytes: Callable[..., Any]
    embedding: Callable[..., Any]
    norm: Callable[..., Any]
    qk_norm: Callable[..., Any]
    silu_mul: Callable[..., Any]
    gelu_tanh_mul: Callable[..., Any]
    activate: Callable[..., Any]
    rope_and_cache: Callable[..., Any]
    paged_attention: Callable[..., Any]
    partial_attention: Callable[..., Any]
    merge_attention: Callable[..., Any]
    short_conv: Callable[..., Any]
    delta_rule: Callable[..., Any]
    linear_heads: Callable[..., Any]
    rope_and_cache_latent: Callable[..., Any]
    latent_attention: Callable[..., Any]
    workspace: Callable[..., Any]
    shared_workspace: Callable[..., Any]
    run_layers: Callable[..., Any]
    join: Callable[..., Any]
    all_reduce: Callable[..., Any]
    exchange: Callable[..., Any]
    send: Callable[..., Any]
    receive: Callable[..., Any]
    sample: Callable[..., Any]
    logprobs: Callable[..., Any]


def open_library(path: Path) -> Library:
    """Bind the functions of a built library. Raises BuildError if it cannot be loaded."""
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"cannot load the compiled kernels: {error}") from error
    functions = {}
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(handle, f"fl_{name}")
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return Library(**functions)


@functools.cache
def library() -> Library:
    """The kernels of this machine, built on first use, with torch's number of threads. Raises BuildError."""
    loaded = open_library(build())
    loaded.set_threads(torch.get_num_threads())
    return loaded
