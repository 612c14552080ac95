"""Checkpoints whose keys differ by publisher and version: text models saved with or without their head, and the two
sides of a vision-language model, a source for the language model under the keys of a plain text model, and the tensors
of the image side under those of `vision/weights.py`.

Used by `checkpoint.py`, engine and worker processes.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from model_runtime.quantized import QuantizedFormat, QuantizedMatrix
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.source import Index, TensorSource, whole
from vision.weights import vision_key

LANGUAGE_PREFIXES = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.blocks.", "model.layers."),
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
"""Beginnings of the language model's keys, and what a plain text model has there. Old files of Qwen2-VL have that.
The first that fits counts."""

BASE_EMBEDDING, BASE_PREFIX = "embed_tokens.weight", "model."
"""A key of a model that was saved without its head, and what precedes it in a whole one."""


def language_key(key: str) -> str:
    """The key of a plain text model for one of the language side; another key as it is."""
    for spelling, plain in LANGUAGE_PREFIXES:
        if key.startswith(spelling):
            return plain + key.removeprefix(spelling)
    return key


def text_source(source: TensorSource) -> tuple[TensorSource, bool]:
    """(the tensors of a text model under the usual keys, whether it may be without an output matrix): embedding models
    are often saved so, as the base of a model that writes, whose keys lack the prefix."""
    if BASE_EMBEDDING not in source.keys():  # noqa: SIM118  (a TensorSource is not a mapping)
        return source, False
    return Renamed(source, {BASE_PREFIX + key: key for key in source.keys()}), True  # noqa: SIM118


class Renamed:
    """Some tensors of a source under other keys: a TensorSource."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        """`names` has the source's key for each new one."""
        self._source, self._names = source, names

    def keys(self) -> frozenset[str]:
        """As in TensorSource."""
        return frozenset(self._names)

    def shape(self, key: str) -> tuple[int, ...]:
        """As in TensorSource."""
        return self._source.shape(self._names[key])

    def dtype(self, key: str) -> torch.dtype:
        """As in TensorSource."""
        return self._source.dtype(self._names[key])

    def quantized(self, key: str) -> QuantizedFormat | None:
        """As in TensorSource."""
        return self._source.quantized(self._names[key])

    def read_quantized(self, key: str, index: Index) -> QuantizedMatrix:
        """As in TensorSource."""
        return self._source.read_quantized(self._names[key], index)

    def read_into(self, key: str, index: Index, target: Tensor) -> None:
        """As in TensorSource."""
        self._source.read_into(self._names[key], index, target)


def split_sides(source: TensorSource) -> tuple[Renamed, Renamed]:
    """The language model's tensors and the image side's. Raises CheckpointError for two spellings of one key."""
    language: dict[str, str] = {}
    image: dict[str, str] = {}
    for key in sorted(source.keys()):
        image_key = vision_key(key)
        side, name = (language, language_key(key)) if image_key is None else (image, image_key)
        if name in side:
            raise CheckpointError(f"the checkpoint holds {name} twice, as {side[name]} and as {key}")
        side[name] = key
    return Renamed(source, language), Renamed(source, image)


class ImageTensors(Mapping[str, Tensor]):
    """Tensors of a source by key, in their storage type, each read whenever it is asked for; frequencies that a config
    determines are left out."""

    def __init__(self, source: TensorSource, device: torch.device, progress: Callable[[int], None]) -> None:
        """`progress` is told how many numbers each tensor that was read has."""
        self._source, self._device, self._progress = source, device, progress
        keys = source.keys()
        self._keys = frozenset(key for key in keys if not key.endswith(".inv_freq"))

    def __getitem__(self, key: str) -> Tensor:
        """Raises CheckpointError for a type that is not supported, and for numbers that are not finite."""
        if key not in self._keys:
            raise KeyError(key)
        tensor = torch.empty(self._source.shape(key), dtype=self._source.dtype(key))
        self._source.read_into(key, whole(tensor.shape), tensor)
        if not torch.isfinite(tensor.sum(dtype=torch.float32)):
            raise CheckpointError(f"NaN or infinite weights in {key}")
        self._progress(tensor.numel())
        return tensor.to(self._device)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
