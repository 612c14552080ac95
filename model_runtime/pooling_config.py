"""How a checkpoint makes one vector of a text: what sentence-transformers' files or a GGUF file's metadata say of it.

Called by the API process, which finishes the vectors (`server/embedding.py`); does not import torch. A generative
checkpoint says nothing. What is not supported is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NoReturn

from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_file import read_gguf
from model_runtime.weights.json_file import read_json, read_json_if_any, read_json_list

MODULES = "modules.json"
Kind = Literal["mean", "last"]
PoolingChoice = Literal["auto", "mean", "last"]

_KINDS: Mapping[str, Kind] = MappingProxyType({"mean": "mean", "lasttoken": "last"})
"""sentence-transformers' modes that are supported."""
_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens": "weightedmean",
        "pooling_mode_lasttoken": "lasttoken",
    }
)
"""Their older spelling: a flag for each."""
_GGUF_KINDS: Mapping[int, Kind] = MappingProxyType({1: "mean", 3: "last"})
_GGUF_NONE = 0
"""llama.cpp's numbers under `pooling_type`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRecipe:
    """From the final norm's output of all tokens to a text's vector."""

    kind: Kind
    normalise: bool = True
    """Divide it by its length."""
    can_be_cut: bool = False
    """Trained so that the first numbers are a vector too (Matryoshka, arXiv 2205.13147)."""
    lengths: tuple[int, ...] = ()
    """To which it may be cut; empty: to any."""


def read_pooling(path: Path, choice: PoolingChoice) -> PoolingRecipe | None:
    """What the checkpoint says, unless the server's user chose for it; None where nobody says anything. Raises
    CheckpointError."""
    config = read_json_if_any(path / "config.json") if path.is_dir() else {}
    can_be_cut, lengths = _matryoshka(config)
    if choice != "auto":
        return PoolingRecipe(kind=choice, can_be_cut=can_be_cut, lengths=lengths)
    if not path.is_dir():
        return _of_gguf(path)
    if not (path / MODULES).is_file():
        return None
    kind, normalise = _of_modules(path)
    return PoolingRecipe(kind=kind, normalise=normalise, can_be_cut=can_be_cut, lengths=lengths)


def _fail(what: str) -> NoReturn:
    raise CheckpointError(f"{what}; --pooling mean or --pooling last serves the model all the same")


def _of_modules(folder: Path) -> tuple[Kind, bool]:
    """(kind, whether a Normalize module follows). The modules are the transformer, the pooling, and perhaps that."""
    types, config = [], None
    for module in read_json_list(folder / MODULES):
        if not isinstance(module, dict) or not all(isinstance(module.get(key), str) for key in ("type", "path")):
            raise CheckpointError(f"{MODULES}: each module must be an object with a type and a path")
        types.append(module["type"].rsplit(".", 1)[-1])
        if types[-1] == "Pooling":
            config = read_json(folder / module["path"] / "config.json")
    if types not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or config is None:
        _fail(f"{MODULES}: Transformer, Pooling and perhaps Normalize are supported, not {', '.join(types) or 'none'}")
    modes = _modes(config)
    if len(modes) != 1 or modes[0] not in _KINDS:
        _fail(f"the pooling mode {' + '.join(modes) or 'none'} is not supported; {', '.join(_KINDS)} are")
    return _KINDS[modes[0]], types[-1] == "Normalize"


def _modes(config: Mapping[str, object]) -> list[str]:
    mode = config.get("pooling_mode")
    if isinstance(mode, str):
        return [mode]
    return [name for flag, name in _FLAGS.items() if config.get(flag) is True]


def _of_gguf(path: Path) -> PoolingRecipe | None:
    metadata = read_gguf(path).metadata
    value = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", _GGUF_NONE)
    if value == _GGUF_NONE:
        return None
    if not isinstance(value, int) or value not in _GGUF_KINDS:
        _fail(f"{path.name}: pooling_type {value!r} is not supported; 1 (mean) and 3 (last) are")
    return PoolingRecipe(kind=_GGUF_KINDS[value])


def _matryoshka(config: Mapping[str, object]) -> tuple[bool, tuple[int, ...]]:
    """As vLLM reads it: (whether vectors may be cut, to which lengths if not to all)."""
    lengths = config.get("matryoshka_dimensions")
    if lengths is None:
        return config.get("is_matryoshka") is True, ()
    if (
        not isinstance(lengths, list)
        or not lengths
        or not all(type(length) is int and length > 0 for length in lengths)
    ):
        raise CheckpointError(f"config.json: matryoshka_dimensions must be a list of lengths, not {lengths!r}")
    return True, tuple(lengths)
