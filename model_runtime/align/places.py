"""Places: the points of a forward pass at which the product and a reference are compared, and their names.

A place is named as the reference's module is, by the plain checkpoint key without `model.`: `layers.3.self_attn.q_proj`
followed by `.out` or `.in`; `layers.3.in` and `layers.3.out` are the residual stream. Which columns of an operation's
result are which place follows from the weight tables, so a block that declares its weights needs nothing else here.
Used by `tracer.py` and `transformers_reference.py`, in the process of `firstlight align`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from model_runtime.share import Share
from model_runtime.weights.table import Parameter

LOGITS, VISION = "logits", "vision."
_LAYER = re.compile(r"layers\.(\d+)\.")
_INPUT_KINDS: Mapping[str, str] = MappingProxyType({"output": "attention", "down": "activation"})
"""What a linear layer of this name takes was made by; others take the residual stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Columns of an operation that are a place of their own, or on one of many ranks a part of one."""

    path: str
    """Without `.in` or `.out`."""
    own: slice
    """Columns of the operation's result."""
    there: slice
    """Columns of the reference's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A parameter's places."""

    parameter: str
    parts: tuple[Part, ...]
    input_there: slice | None
    """Columns of the reference's input, where a rank has some of them, and its results are summands; None: all."""


def module_path(key: str) -> str:
    """The place of a plain checkpoint key."""
    return key.removeprefix("model.").removesuffix(".weight")


def is_place(key: str) -> bool:
    """Whether what the weight under this plain key makes is a place: norms of layers with states are not, which
    transformers multiplies with their gates."""
    return key.endswith(".weight") and not key.endswith(".o_norm.weight")


def vision_path(key: str) -> str:
    """The place of a key of the image side."""
    return VISION + key.removesuffix(".weight")


def named_parameters(table: Sequence[Parameter], share: Share) -> dict[str, Named]:
    """By parameter; biases belong to their weights, and experts' rows are not those of the step."""
    return {
        parameter.name: _named(parameter, share)
        for parameter in table
        if parameter.expert is None and parameter.belongs_to(share) and is_place(parameter.slots[0].key)
    }


def _named(parameter: Parameter, share: Share) -> Named:
    parts, end = [], 0
    for slot in parameter.slots:
        rows = slot.part(share)
        count = rows.stop - rows.start
        parts.append(Part(path=module_path(slot.key), own=slice(end, end + count), there=rows))
        end += count
    is_summand = parameter.columns_split is not None and share.size > 1
    return Named(
        parameter=parameter.name,
        parts=tuple(parts),
        input_there=parameter.columns_part(share) if is_summand else None,
    )


def layer_of(place: str) -> int | None:
    """None: before the first layer or behind the last one."""
    found = _LAYER.match(place)
    return None if found is None else int(found[1])


def input_kind(parameter: str) -> str:
    """The kind of operation that makes what this linear layer takes."""
    return _INPUT_KINDS.get(parameter.removesuffix(".weight").rpartition(".")[2], "residual")
