"""Checkpoints whose keys differ by publisher and version: text models saved with or without their head, and the two
sides of a vision-language model, a source for the language model under the keys of a plain text model, and the tensors
of the image side under those of `vision/weights.py`.

Used by `opening.py`, engine and worker processes.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.source import TensorSource, check_finite, check_float, read, whole
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
    if BASE_EMBEDDING not in source:
        return source, False
    return {BASE_PREFIX + key: tensor for key, tensor in source.items()}, True


def split_sides(source: TensorSource) -> tuple[TensorSource, TensorSource]:
    """The language model's tensors and the image side's. Raises CheckpointError for two spellings of one key."""
    language: dict[str, str] = {}
    image: dict[str, str] = {}
    for key in sorted(source):
        image_key = vision_key(key)
        side, name = (language, language_key(key)) if image_key is None else (image, image_key)
        if name in side:
            raise CheckpointError(f"the checkpoint holds {name} twice, as {side[name]} and as {key}")
        side[name] = key
    return {name: source[key] for name, key in language.items()}, {name: source[key] for name, key in image.items()}


class ImageTensors(Mapping[str, Tensor]):
    """Tensors of a source by key, in their storage type, each read whenever it is asked for; frequencies that a config
    determines are left out."""

    def __init__(self, source: TensorSource, device: torch.device, progress: Callable[[int], None]) -> None:
        """`progress` is told how many numbers each tensor that was read has."""
        self._source, self._device, self._progress = source, device, progress
        self._keys = frozenset(key for key in source if not key.endswith(".inv_freq"))

    def __getitem__(self, key: str) -> Tensor:
        """Raises CheckpointError for a type that is not supported, and for numbers that are not finite."""
        if key not in self._keys:
            raise KeyError(key)
        stored = self._source[key]
        check_float(key, stored)
        tensor = read(stored, whole(stored.shape))
        check_finite(key, stored, tensor)
        self._progress(tensor.numel())
        return tensor.to(self._device)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
