"""The weights of a tower and its projector as they compute: vectors in float32, matrices as functions.

Made by `model.ImageEncoder` from what `weights.load_vision` returns, read by the towers and projectors. Engine and
worker processes. Products of matrices and activations are given from outside, since `vision` has no kernels: in torch
both depend on where in a tensor a number stands and on the number of threads, in the runtime's they do not.

Legend: T rows, K input and N output features, C width of a vector.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from vision.tower_config import Activation, Norm

Matrix = Callable[[Tensor], Tensor]
"""Contiguous float32 [T, K] -> [T, N]: x times the transposed weight, plus the bias if there is one."""


class Kernels(Protocol):
    """What a tower is computed with, beside plain torch: `model_runtime.images.TowerKernels`."""

    def matrix(self, weight_NK: Tensor, bias_N: Tensor | None) -> Matrix:
        """From a weight as the checkpoint stores it, contiguous, and a float32 bias."""
        ...

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """The function of every number of a contiguous float32 tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Parameters:
    """By the names that `weights.vision_table` declares; a matrix's name lacks the ending `.weight`."""

    vectors: Mapping[str, Tensor]
    """float32: norms, positions, tokens, scales."""
    matrices: Mapping[str, Matrix]
    kernels: Kernels

    def linear(self, x: Tensor, name: str) -> Tensor:
        """[.., K] -> [.., N] by the matrix of this name."""
        out_TN = self.matrices[name](x.reshape(-1, x.shape[-1]).contiguous())
        return out_TN.reshape(*x.shape[:-1], out_TN.shape[-1])

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """The function of every number."""
        return self.kernels.activate(x.contiguous(), activation)

    def normed(self, x: Tensor, name: str, norm: Norm, eps: float) -> Tensor:
        """[.., C] -> [.., C]: layer norm or RMS norm by the vectors of this name."""
        weight_C = self.vectors[f"{name}.weight"]
        if norm == "rms":
            return rms_norm(x, weight_C.shape, weight_C, eps)
        return layer_norm(x, weight_C.shape, weight_C, self.vectors[f"{name}.bias"], eps)


def is_matrix(name: str, tensor: Tensor) -> bool:
    """Whether a parameter becomes a matrix, which keeps its storage type, and not a vector of float32: every `.weight`
    of two or more axes, and Gemma 3's `.matrix`."""
    return tensor.dim() > 1 and name.endswith((".weight", ".matrix"))


def pack_parameters(tensors: dict[str, Tensor], kernels: Kernels) -> Parameters:
    """Takes the tensors out of the dictionary one by one, so that no more than one of them exists in both forms.

    A convolution's weight [C, channels, ..] is the matrix [C, K]; Gemma 3's `.matrix` is stored [in, out].
    """
    vectors: dict[str, Tensor] = {}
    matrices: dict[str, Matrix] = {}
    for name in sorted(tensors, key=lambda name: name.endswith(".bias")):
        if name not in tensors:
            continue
        tensor = tensors.pop(name)
        if not is_matrix(name, tensor):
            vectors[name] = tensor.float()
        elif name.endswith(".matrix"):
            matrices[name] = kernels.matrix(tensor.T.contiguous(), None)
        else:
            base = name.removesuffix(".weight")
            bias_N = tensors.pop(f"{base}.bias", None)
            matrices[base] = kernels.matrix(tensor.flatten(1).contiguous(), None if bias_N is None else bias_N.float())
    return Parameters(vectors, matrices, kernels)
