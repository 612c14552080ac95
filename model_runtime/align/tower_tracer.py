"""Watches the product's image tower: a copy of it whose matrices and norms tell the recorder. Process of
`firstlight align`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runtime.align.places import Part, vision_path
from model_runtime.align.tracer import Recorder
from vision.encoder.model import ImageEncoder, ImageFeatures, ImageInput
from vision.encoder.parameters import Parameters
from vision.tower_config import Norm, VisionTowerConfig
from vision.weights import vision_table


def _parts(config: VisionTowerConfig) -> dict[str, tuple[Part, ...]]:
    """By matrix or norm: the columns of its result that are places."""
    parts: dict[str, tuple[Part, ...]] = {}
    for parameter in vision_table(config):
        if not parameter.name.endswith(".weight"):
            continue
        rows = parameter.shape[0]
        slices = [slice(index * rows, (index + 1) * rows) for index in range(len(parameter.keys))]
        parts[parameter.name.removesuffix(".weight")] = tuple(
            Part(path=vision_path(key), own=own, there=slice(None))
            for key, own in zip(parameter.keys, slices, strict=True)
        )
    return parts


@dataclass(frozen=True, slots=True)
class TracedParameters(Parameters):
    """Weights whose results are places. What is recorded is a copy, rows of all tiles one after the other."""

    recorder: Recorder
    parts: Mapping[str, tuple[Part, ...]]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """As in Parameters."""
        given = self._taken(f"{self._path(name)}.in", x, "tower", f"what {name} of the tower takes")
        out = Parameters.linear(self, given, name)
        for part in self.parts.get(name, ()):
            self._taken(f"{part.path}.out", out[..., part.own], "linear", f"linear {name} of the tower")
        return out

    def normed(self, x: Tensor, name: str, norm: Norm, eps: float) -> Tensor:
        """As in Parameters."""
        given = self._taken(f"{self._path(name)}.in", x, "tower", f"what {name} of the tower takes")
        out = Parameters.normed(self, given, name, norm, eps)
        return self._taken(f"{self._path(name)}.out", out, "norm", f"norm {name} of the tower")

    def _path(self, name: str) -> str:
        return self.parts[name][0].path if name in self.parts else ""

    def _taken(self, place: str, found: Tensor, kind: str, operation: str) -> Tensor:
        """What computing goes on with; a part of a tensor is changed in it."""
        rows_TX = found.reshape(-1, found.shape[-1]).clone()
        self.recorder.take_all(place, rows_TX, kind, operation)
        return found.copy_(rows_TX.view(found.shape)) if self.recorder.is_forced else found


@torch.inference_mode()
def encoded(encoder: ImageEncoder, image: ImageInput, recorder: Recorder | None) -> ImageFeatures:
    """Of one image; `recorder` sees how."""
    if recorder is None:
        return encoder.encode([image])[0]
    plain = encoder.parameters
    traced = TracedParameters(plain.vectors, plain.matrices, plain.kernels, recorder, _parts(encoder.config))
    return encoder.with_parameters(traced).encode([image])[0]
