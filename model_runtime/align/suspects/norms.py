"""How a reference normalises, measured: with which weight, epsilon and mean, over what.

Legend: L rows, X width.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from torch import Tensor

from model_runtime.align.suspects.scene import Scene, left_over

OFFSETS: Mapping[float, str] = MappingProxyType(
    {
        0.0: "",
        1.0: "norm weights are 1 larger in the reference: the file holds them less 1",
        -1.0: "norm weights are 1 smaller in the reference: the file holds them as they are",
    }
)


def of_norm(scene: Scene) -> Iterator[str]:
    """What differs from the product's norm of hidden states."""
    if scene.place not in scene.taken:
        yield "the product never applies this norm, though it has its weight: other places of norms?"
        return
    if not scene.has(f"{scene.path}.in"):
        return
    x_LX, y_LX = scene.at(f"{scene.path}.in"), scene.expected_LX
    if left_over(x_LX, y_LX) < scene.close:
        yield "the reference does not normalise here"
        return
    yield from _explained(scene, x_LX, y_LX, scene.vector(), scene.config.norm == "layer")


def of_qk_norm(scene: Scene) -> Iterator[str]:
    """What differs from the product's norm of queries or keys."""
    if scene.place not in scene.taken:
        yield "norms of queries and keys are missing in the product, which has their weights"
        return
    projected = scene.path.replace("_norm", "_proj")
    if not scene.has(f"{projected}.out"):
        return
    x_LX, y_LX, weight = scene.at(f"{projected}.out"), scene.expected_LX, scene.vector()
    if len(weight) == x_LX.shape[1]:
        yield from _explained(scene, x_LX, y_LX, weight, False)
        return
    rows, results = (x.reshape(-1, scene.config.head_dim) for x in (x_LX, y_LX))
    yield from _explained(scene, rows, results, weight, False)


def _explained(scene: Scene, x_LX: Tensor, y_LX: Tensor, weight_X: Tensor, has_mean: bool) -> Iterator[str]:
    for subtracts in (has_mean, not has_mean):
        centred_LX = x_LX - x_LX.mean(dim=1, keepdim=True) if subtracts else x_LX
        for offset in OFFSETS:
            scaled_LX = centred_LX * (weight_X + offset)
            factor_L1 = (scaled_LX * y_LX).sum(1, keepdim=True) / scaled_LX.square().sum(1, keepdim=True)
            if left_over(scaled_LX * factor_L1, y_LX) < scene.close:
                yield from _words(subtracts, has_mean, offset)
                yield from _epsilon(scene.config.rms_norm_eps, factor_L1[:, 0], centred_LX)
                return


def _words(subtracts: bool, has_mean: bool, offset: float) -> Iterator[str]:
    if subtracts != has_mean:
        yield f"the reference {'subtracts the mean: layer norm' if subtracts else 'keeps the mean: RMS norm'}"
    if offset:
        yield OFFSETS[offset]


def _epsilon(own: float, factor_L: Tensor, centred_LX: Tensor) -> Iterator[str]:
    """The number that is added to the mean square: read off the rows where it counts most."""
    square_L = centred_LX.square().mean(dim=1)
    epsilon_L = factor_L.pow(-2) - square_L
    # each is known to about a rounding of float32 of the mean square
    row = int(square_L.argmin())
    count = max(1, len(square_L) // 4)
    smallest = square_L.argsort()[:count]
    measured, uncertain = float(epsilon_L[smallest].median()), 4e-7 * float(square_L[row])
    if abs(measured - own) > max(uncertain, 0.05 * own):
        yield f"norm epsilon: about {measured:.2g} in the reference, {own:.2g} in the product"
