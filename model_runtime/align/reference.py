"""What a reference computes, at every place, as a value and as a file. Process of `firstlight align`.

A file is safetensors: a tensor for each place, float32 [L, width], and the logits. Its metadata says what it was made
of: `firstlight` has the format's version, `prompts` the token ids as JSON, `made_by` words for people.

Legend: L tokens of all prompts, V vocabulary.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model_runtime.align.pictures import Picture
from model_runtime.align.places import LOGITS
from model_runtime.align.prompts import Prompts
from model_runtime.weights.errors import CheckpointError
from vision.encoder.model import ImageInput

VERSION, FULL, PIXELS = "1", "logits of the unquantised model", "pixels"
STREAM = re.compile(r"layers\.\d+\.(in|out)")
DtypeName = Literal["float32", "float16", "bfloat16"]
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Of one checkpoint and some prompts."""

    prompts: Prompts
    places: dict[str, Tensor]
    """float32 [L, width], in the order in which they were computed."""
    aliases: dict[str, str]
    """Places that are the same tensor as another one: what a module takes is often what the one before gave."""
    logits_LV: Tensor
    made_by: str
    dtype: torch.dtype = torch.float32
    """That it was computed in."""
    quantization: str = "none"
    """Weights are what this option of the product makes of them, expanded."""
    picture: Picture | None = None
    """In the first prompt, whose token ids have its place."""
    full_LV: Tensor | None = None
    """Logits of the weights before that."""

    def at(self, place: str) -> Tensor | None:
        """float32 [L, width]; None: the reference has no such place."""
        return self.places.get(self.aliases.get(place, place))

    def stream(self) -> "Reference":
        """The same with the residual stream before and behind each layer for places."""
        stream = {name: tensor for name, tensor in self.places.items() if STREAM.fullmatch(name)}
        return replace(self, places=stream, aliases={})

    def save(self, path: Path) -> None:
        """Raises OSError."""
        metadata = {
            "firstlight": VERSION,
            "prompts": json.dumps(self.prompts),
            "places": json.dumps(list(self.places)),
            "aliases": json.dumps(self.aliases),
            "made_by": self.made_by,
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": self.quantization,
        }
        tensors = {**self.places, LOGITS: self.logits_LV}
        if self.full_LV is not None:
            tensors[FULL] = self.full_LV
        if self.picture is not None:
            tensors[PIXELS] = self.picture.image.pixels
            metadata["picture"] = json.dumps(_described(self.picture))
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from None


def load_reference(path: Path) -> Reference:
    """Raises CheckpointError for a file that `Reference.save` did not write."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("firstlight") != VERSION:
                raise CheckpointError(f"{path} is no reference of this version of firstlight; write it with --dump")
            names: list[str] = json.loads(metadata["places"])
            return Reference(
                prompts=tuple(map(tuple, json.loads(metadata["prompts"]))),
                places={name: file.get_tensor(name) for name in names},
                aliases=json.loads(metadata["aliases"]),
                logits_LV=file.get_tensor(LOGITS),
                made_by=metadata["made_by"],
                dtype=DTYPES[metadata["dtype"]],
                quantization=metadata["quantization"],
                picture=_picture(metadata["picture"], file.get_tensor(PIXELS)) if "picture" in metadata else None,
                full_LV=file.get_tensor(FULL) if FULL in file.keys() else None,  # noqa: SIM118  (no mapping)
            )
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"cannot read the reference {path}: {error}") from None


def _described(picture: Picture) -> dict[str, object]:
    """All but the pixels."""
    image = picture.image
    values = asdict(replace(picture, image=ImageInput(pixels=torch.empty(0)))) | {"image": None}
    return values | {"grid": image.grid, "tile_grid": image.tile_grid, "size": image.size}


def _picture(described: str, pixels: Tensor) -> Picture:
    values: dict[str, Any] = json.loads(described)
    sizes = {name: None if values[name] is None else tuple(values[name]) for name in ("grid", "tile_grid", "size")}
    rest = {name: value for name, value in values.items() if name not in ("image", *sizes)}
    return Picture(**(rest | {"image": ImageInput(pixels=pixels, **sizes), "cells": tuple(rest["cells"])}))
