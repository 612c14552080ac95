"""What a reference computes, at every place, as a value and as a file. Process of `firstlight align`.

A file is safetensors: a tensor for each place, float32 [L, width], and the logits. Its metadata says what it was made
of: `firstlight` has the format's version, `prompts` the token ids as JSON, `made_by` words for people.

Legend: L tokens of all prompts, V vocabulary.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model_runtime.align.places import LOGITS
from model_runtime.align.prompts import Prompts
from model_runtime.weights.errors import CheckpointError

VERSION, FULL = "1", "logits of the unquantised model"
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
    full_LV: Tensor | None = None
    """Logits of the weights before that."""

    def at(self, place: str) -> Tensor | None:
        """float32 [L, width]; None: the reference has no such place."""
        return self.places.get(self.aliases.get(place, place))

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
        extra = {} if self.full_LV is None else {FULL: self.full_LV}
        tensors = {
            name: tensor.contiguous() for name, tensor in {**self.places, **extra, LOGITS: self.logits_LV}.items()
        }
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
                full_LV=file.get_tensor(FULL) if FULL in file.keys() else None,  # noqa: SIM118  (no mapping)
            )
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"cannot read the reference {path}: {error}") from None
