"""Operations of the models: `load_ops` picks the implementations for a device, `set_threads` how many cores they use.
Called once each by the runner, in engine and worker processes."""

import logging

import torch

from model_runtime.kernels.build import BuildError
from model_runtime.kernels.library import library
from model_runtime.ops import (  # noqa: F401  they register them
    cpu,
    cpu_attention,
    cpu_latent,
    cpu_sampling,
    cuda,
    delta,
    latent,
    matrices,
    program,
    reference,
    sampling,
)
from model_runtime.ops.registry import Ops, select

logger = logging.getLogger(__name__)


def load_ops(device: torch.device, kernels: str) -> Ops:
    """The operations for `device`; `kernels` is 'auto' or 'reference' (see RuntimeConfig.kernels). Compiled kernels are
    built if need be; without a compiler a warning says what to install, and the reference is returned."""
    if kernels == "reference":
        return select("any")
    if device.type == "cpu":
        try:
            library()
        except BuildError as error:
            logger.warning("using plain torch operations, which are slower: %s", error)
            return select("any")
    return select(device.type)


def is_compiled(ops: Ops) -> bool:
    """Whether these are our own kernels, which pack weights in a way of theirs."""
    return ops == select("cpu")


def describe(ops: Ops, device: torch.device) -> str:
    """For people: what computes."""
    kernels = "plain torch operations" if ops == select("any") else "fused torch operations"
    if device.type == "cpu":
        return "compiled kernels" if is_compiled(ops) else kernels
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return f"{kernels} on {name}"


def set_threads(count: int) -> None:
    """Compute threads of torch and of the compiled kernels; call it before load_ops."""
    torch.set_num_threads(count)
    if library.cache_info().currsize:
        library().set_threads(count)
