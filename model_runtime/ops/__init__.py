"""Operations of the models: `load_ops` picks the implementations for a device. Called once by the runner."""

import torch

from model_runtime.ops import reference  # noqa: F401  registers the operations for every device
from model_runtime.ops.registry import Ops, select


def load_ops(device: torch.device, kernels: str) -> Ops:
    """The operations for `device`; `kernels` is 'auto' or 'reference' (see RuntimeConfig.kernels)."""
    return select("any" if kernels == "reference" else device.type)
