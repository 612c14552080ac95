"""What the searches for a cause are given, and how they tell that they have found it. Process of `firstlight align`.

Legend: L tokens of all prompts, X width of a place, N and K rows and columns of a matrix.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runtime.align.places import VISION, Named, named_parameters, vision_path
from model_runtime.align.product import Product
from model_runtime.align.reference import Reference
from model_runtime.align.tracer import Taken
from model_runtime.architecture import ModelConfig
from model_runtime.models.decoder import decoder_table
from model_runtime.ops.registry import PackedWeight
from vision.weights import vision_table

CLOSE = 2e-4
"""Relative to the whole: what an explanation may leave unexplained where sums are float32. Float16 leaves more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A place that diverges, with all that is around it."""

    product: Product
    reference: Reference
    place: str
    layer: int
    """0 for a place before the layers; the number of layers behind them."""
    taken: Mapping[str, Taken]
    """What the product computed of the reference's inputs."""
    close: float = CLOSE

    @property
    def config(self) -> ModelConfig:
        """As the product read it."""
        return self.product.decoder.config

    @property
    def path(self) -> str:
        """The place without its side."""
        return self.place.rpartition(".")[0]

    @property
    def expected_LX(self) -> Tensor:
        """float64: the reference's."""
        return self.at(self.place)

    @property
    def found_LX(self) -> Tensor:
        """float64: the product's."""
        return self.taken[self.place].values.double()

    @property
    def positions_L(self) -> Tensor:
        """Of each row in its prompt."""
        return torch.cat([torch.arange(len(prompt)) for prompt in self.reference.prompts])

    def prompts(self) -> Iterator[slice]:
        """The rows of each."""
        start = 0
        for prompt in self.reference.prompts:
            yield slice(start, start + len(prompt))
            start += len(prompt)

    def has(self, place: str) -> bool:
        """Whether the reference has such a place."""
        return self.reference.at(place) is not None

    def at(self, place: str) -> Tensor:
        """float64 [L, X] of the reference."""
        found = self.reference.at(place)
        assert found is not None, f"the reference has no {place}"
        return found.double()

    def neighbours(self, prefix: str) -> dict[str, Tensor]:
        """float64: places that come before this one and begin so, and are as wide."""
        names = list(self.reference.places)
        here = self.reference.aliases.get(self.place, self.place)
        before = names[: names.index(here)] if here in names else names
        width = self.expected_LX.shape[1]
        tensors = {name: self.reference.places[name] for name in before if name.startswith(prefix)}
        return {name: tensor.double() for name, tensor in tensors.items() if tensor.shape[1] == width}

    def named(self) -> dict[str, Named]:
        """Places by the product's parameters."""
        return named_parameters(decoder_table(self.config), self.product.decoder.share)

    def vector(self) -> Tensor:
        """float64: the product's norm weight of this place."""
        found = next(name for name, named in self.named().items() if any(p.path == self.path for p in named.parts))
        return self.product.decoder.parameters.vectors[found].double().cpu()

    def matrix(self, path: str) -> Tensor | None:
        """float64 [N, K]: the product's weight of a place, as it multiplies with it."""
        if path.startswith(VISION):
            return self._tower_matrix(path)
        decoder = self.product.decoder
        for name, named in self.named().items():
            for part in named.parts:
                if part.path == path and name in decoder.parameters.matrices:
                    weight = self._at_hand(name)
                    unit = torch.eye(weight.num_columns, dtype=decoder.dtype, device=self.product.device)
                    return decoder.ops.linear(unit, weight, None).T[part.own].double().cpu()
        return None

    def _at_hand(self, name: str) -> PackedWeight:
        """A matrix of the decoder, brought to the device if it is in host memory."""
        parameters = self.product.decoder.parameters
        layer = next(part.matrix_of_layer for part in decoder_table(self.config) if part.name == name)
        if layer is not None and parameters.staging is not None and layer in parameters.staging:
            parameters.staging.enter(layer)
        return parameters.matrices[name]

    def _tower_matrix(self, path: str) -> Tensor | None:
        vision = self.product.model.vision
        assert vision is not None, "a place of a tower, and there is none"
        for parameter in vision_table(vision.encoder.config):
            name = parameter.name.removesuffix(".weight")
            if vision_path(parameter.keys[0]) == path and len(parameter.keys) == 1 and len(parameter.shape) == 2:
                matrix, width = vision.encoder.parameters.matrices[name], parameter.shape[1]
                unit = torch.eye(width, device=self.product.device)
                return (matrix(unit) - matrix(torch.zeros_like(unit))).T.double().cpu()
        return None


def left_over(found: Tensor, expected: Tensor) -> float:
    """How far two tensors are apart, of the size of the second."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def factor_of(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """The number that the first must be multiplied with to be the second, and what that leaves unexplained."""
    factor = float((found * expected).sum() / found.square().sum().clamp(min=1e-300))
    return factor, left_over(found * factor, expected)
