"""What a reference multiplies and activates with: another bias, a transposed or exchanged matrix, another function.

Legend: L rows, N and K rows and columns of a matrix, F intermediate features.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, sigmoid, silu

from model_runtime.align.suspects.scene import Scene, factor_of, left_over

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": silu,
        "gelu with tanh": lambda x: gelu(x, approximate="tanh"),
        "gelu": gelu,
        "relu": relu,
        "relu squared": lambda x: relu(x).square(),
        "sigmoid": sigmoid,
    }
)


def of_linear(scene: Scene) -> Iterator[str]:
    """What differs from the product's linear layer."""
    y_LN, own_LN = scene.expected_LX, scene.found_LX
    apart_LN = y_LN - own_LN
    if left_over(apart_LN.mean(dim=0).expand_as(apart_LN), apart_LN) < 1e-3:
        yield "bias: the reference adds a vector that the product does not, or another one"
        return
    if scene.path == "lm_head" and scene.config.tie_word_embeddings:
        yield "tied embeddings: the product takes the embedding for the output matrix, the reference has another one"
        return
    factor, rest = factor_of(own_LN, y_LN)
    if rest < scene.close and abs(factor - 1) > scene.close:
        yield f"missing scale: the reference's result is {factor:.6g} times the product's"
        return
    yield from _other_matrix(scene, y_LN)
    yield from _other_order(own_LN, y_LN, scene.config.head_dim)


def _other_matrix(scene: Scene, y_LN: Tensor) -> Iterator[str]:
    if not scene.has(f"{scene.path}.in"):
        return
    x_LK = scene.at(f"{scene.path}.in")
    weight_NK = scene.matrix(scene.path)
    constant_N = y_LN.mean(dim=0)
    if weight_NK is not None and weight_NK.shape[0] == weight_NK.shape[1]:
        product_LN = x_LK @ weight_NK
        if left_over(product_LN - product_LN.mean(dim=0), y_LN - constant_N) < scene.close:
            yield "the matrix is transposed in the product"
            return
    for path in _others(scene):
        other_NK = scene.matrix(path)
        if other_NK is None or other_NK.shape != (y_LN.shape[1], x_LK.shape[1]):
            continue
        product_LN = x_LK @ other_NK.T
        if left_over(product_LN - product_LN.mean(dim=0), y_LN - constant_N) < scene.close:
            yield f"the reference multiplies with what is {path} in the product: exchanged, or tied where it is not"
            return


def _others(scene: Scene) -> Iterator[str]:
    """Other matrices of the layer; behind the layers the embedding and the output matrix."""
    prefix = f"layers.{scene.layer}."
    for named in scene.named().values():
        for part in named.parts:
            is_near = part.path.startswith(prefix) if scene.path.startswith("layers.") else "layers." not in part.path
            if is_near and part.path != scene.path:
                yield part.path


def _other_order(own_LN: Tensor, y_LN: Tensor, head_dim: int) -> Iterator[str]:
    """Rows of the matrix that stand elsewhere: of halves and neighbours within a head, or at all."""
    half = torch.arange(head_dim).view(2, -1).T.flatten()
    if y_LN.shape[1] % head_dim == 0:
        heads_LHD = own_LN.view(len(own_LN), -1, head_dim)
        for order in (half, half.argsort()):
            if left_over(heads_LHD[..., order].flatten(1), y_LN) < 1e-3:
                yield "rows of each head are in the order of the other rope layout: halves here, neighbours there"
                return
    normed = [x / x.norm(dim=0).clamp(min=1e-30) for x in (own_LN, y_LN)]
    best_N = (normed[0].T @ normed[1]).max(dim=0)
    if bool((best_N.values > 1 - 1e-6).all()):
        moved = int((best_N.indices != torch.arange(len(best_N.indices))).sum())
        yield f"{moved} of {len(best_N.indices)} rows of the matrix are in another place in the product"


def of_activation(scene: Scene) -> Iterator[str]:
    """What differs from the product's gate."""
    owner, y_LF = scene.path.rpartition(".")[0], scene.expected_LX
    gate, up = f"{owner}.gate_proj.out", f"{owner}.up_proj.out"
    if not (scene.has(gate) and scene.has(up)):
        return
    for name, function in FUNCTIONS.items():
        if left_over(function(scene.at(gate)) * scene.at(up), y_LF) < scene.close:
            yield f"activation: {name} in the reference"
            return
        if left_over(function(scene.at(up)) * scene.at(gate), y_LF) < scene.close:
            yield f"gate and up are exchanged; the activation is {name} in the reference"
            return
