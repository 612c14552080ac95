"""Every operation that a model calls, by each implementation that there is for the device: how far it is from float64,
how long it takes, and how much it reads and computes meanwhile. Called by `server/align/ops_command.py`.

The model is run once in float64 by the reference; what its operations were given there, in the types of the device, is
given to each implementation.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from model_runtime.align.product import Product
from model_runtime.align.prompts import Prompts, num_blocks, steps
from model_runtime.align.timing import best_seconds
from model_runtime.batch import Batch, Runs, make_batch
from model_runtime.caches import allocate_caches
from model_runtime.checkpoint import load_model
from model_runtime.device_batch import upload
from model_runtime.kv_store import KVLayer
from model_runtime.latent_store import LatentLayer
from model_runtime.models.decoder import Decoder
from model_runtime.models.layer import EagerLayers
from model_runtime.ops.registry import Ops, PackedWeight, RopeTable, Scoring, implementations, select
from model_runtime.state_store import StateLayer
from model_runtime.weights.load import Precision

T = TypeVar("T")
PROMPT, SEQUENCES = 64, 4
"""Tokens of the step that computes prompts, and sequences of the step after it, of a token each."""
COMPARED = (
    "linear",
    "linear_heads",
    "embedding",
    "rms_norm",
    "layer_norm",
    "qk_norm",
    "rope_and_cache",
    "rope_and_cache_latent",
    "paged_attention",
    "latent_attention",
    "silu_mul",
    "gelu_tanh_mul",
    "activate",
    "short_conv",
    "delta_rule",
)
"""Operations of one rank's step, but for sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What an operation was given in float64, and what it gave."""

    operation: str
    step: str
    """prompt or decode."""
    arguments: tuple[Any, ...]
    result: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One implementation of one operation."""

    operation: str
    step: str
    shape: str
    implementation: str
    """reference, or the kind of device that it is for."""
    is_used: bool
    """By the product on this device."""
    falls_back: bool
    """It is the reference, and there is none for the device."""
    error: float
    """The largest difference from float64, relative to the root of the mean square."""
    seconds: float
    bytes_moved: int
    flops: int


@dataclass(slots=True)
class _Capture:
    """Keeps the first call of each shape in each step."""

    step: str = ""
    calls: dict[tuple[object, ...], Call] = field(default_factory=dict)

    def watched(self, ops: Ops) -> Ops:
        """The same operations."""
        watched: dict[str, Any] = {name: self._watched(name, getattr(ops, name)) for name in COMPARED}
        return replace(ops, layer_program=_no_program, **watched)

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            key = (name, self.step, *map(_shape, arguments))
            is_new = key not in self.calls
            given = tuple(map(_copied, arguments)) if is_new else ()
            result = function(*arguments)
            if is_new:
                made = _first(name, arguments, arguments[0] if result is None else result).clone()
                self.calls[key] = Call(operation=name, step=self.step, arguments=given, result=made)
            return result

        return call


def _no_program(layers: object, collectives: object, sharers: object) -> None:
    return None


def _first(name: str, arguments: Sequence[Any], result: Tensor) -> Tensor:
    """What the operation changed, or gave."""
    found: Tensor = arguments[2] if name == "linear_heads" else result
    return found


def _shape(value: Any) -> object:
    """What tells calls apart: sizes of rows and of weights, and not how many rows there are."""
    if isinstance(value, PackedWeight):
        return value.num_rows, value.num_columns, value.quantized
    if isinstance(value, Tensor):
        return tuple(value.shape[1:])
    return value if isinstance(value, str) else type(value).__name__


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, KVLayer | LatentLayer | StateLayer):
        return copy.deepcopy(value)
    return value


def calls_of(path: Path, product: Product, prompts: Prompts) -> tuple[list[Call], Decoder]:
    """In float64 on CPU, with the decoder that made them."""
    precision = Precision(quantization=product.quantization, row_bits=0)  # type: ignore[arg-type]
    ops, device = select("any"), torch.device("cpu")
    plain = copy.copy(load_model(path, ops, device, lambda fraction: None, product.positions, precision).decoder)
    capture = _Capture()
    plain.dtype, plain.ops = torch.float64, capture.watched(ops)
    plain.stack = EagerLayers(plain.ops, plain.layers)
    blocks, size = num_blocks(prompts, product.block_size), product.block_size
    kv = allocate_caches(plain.own, blocks, size, torch.float64, device, len(prompts))
    with torch.inference_mode():
        for step in steps(prompts, product.block_size, chunk=PROMPT):
            capture.step = "decode" if step.plan.query_lens[0] == 1 else "prompt"
            plain.logits(plain.forward(make_batch(step.plan, product.block_size), kv))
    return list(capture.calls.values()), plain


class _Given:
    """Arguments as an implementation takes them: numbers in the types of the product, weights as it packs them."""

    def __init__(self, product: Product, plain: Decoder, packed: Decoder) -> None:
        """`packed` has the weights as the implementation packs them."""
        self._device, self._kv_type, self.hidden = product.device, product.kv_type, product.decoder.dtype
        self.kv_bytes = product.kv_type.itemsize
        there, here = plain.parameters.matrices, packed.parameters.matrices
        self._weights = {id(there[name]): here[name] for name in there if name in here}

    def of(self, value: Any) -> Any:
        """A fresh one, since some are changed."""
        if isinstance(value, PackedWeight):
            return self._weights[id(value)]
        if isinstance(value, Tensor):
            return value.to(self._device, self.hidden if value.dtype == torch.float64 else value.dtype, copy=True)
        if isinstance(value, Batch):
            return value if self._device.type == "cpu" else upload(value, self._device)
        if isinstance(value, KVLayer):
            moved = (pool.to(self._device, self._kv_type, copy=True) for pool in (value.key_NHDB, value.value_NHBD))
            return KVLayer(*moved)
        if isinstance(value, RopeTable):
            growth_P = None if value.growth_P is None else value.growth_P.to(self._device)
            cos, sin = value.cos_PR2.to(self._device), value.sin_PR2.to(self._device)
            return replace(value, cos_PR2=cos, sin_PR2=sin, growth_P=growth_P)
        if isinstance(value, Scoring) and value.sinks_H is not None:
            return replace(value, sinks_H=value.sinks_H.to(self._device))
        if isinstance(value, StateLayer):
            return StateLayer(*(pool.to(self._device, copy=True) for pool in (value.conv_NPC, value.delta_NHKV)))
        if isinstance(value, LatentLayer):
            rows_NBX = value.rows_NBX.to(self._device, self._kv_type, copy=True)
            return replace(value, rows_NBX=rows_NBX)
        return value


@torch.inference_mode()
def measure(product: Product, plain: Decoder, calls: Sequence[Call]) -> Iterator[Measured]:
    """Of each call by each implementation; the product's comes first."""
    own = product.device.type
    for call in calls:
        known = implementations(call.operation)
        used = own if known.get(own) is getattr(product.decoder.ops, call.operation) else "any"
        for kind in sorted({own, "any"} & known.keys(), key=lambda kind: kind != used):
            has_weight = any(isinstance(value, PackedWeight) for value in call.arguments)
            if kind != used and has_weight and own != "cpu":
                continue  # its weights are on CPU
            given = _Given(product, plain, product.decoder if kind == used else plain)
            is_reference = kind == "any"
            yield Measured(
                operation=call.operation,
                step=call.step,
                shape=_words(call),
                implementation="reference" if is_reference else kind,
                is_used=kind == used,
                falls_back=is_reference and kind == used and own not in known,
                error=_error(call, known[kind], given),
                seconds=_seconds(call, known[kind], given, product.device),
                bytes_moved=_bytes(call, given),
                flops=_flops(call),
            )


def _error(call: Call, function: Callable[..., Any], given: _Given) -> float:
    arguments = tuple(map(given.of, call.arguments))
    result = function(*arguments)
    found = _first(call.operation, arguments, arguments[0] if result is None else result).double().cpu()
    size = call.result.square().mean().sqrt().clamp(min=1e-30)
    return float((found - call.result).abs().max() / size)


def _seconds(call: Call, function: Callable[..., Any], given: _Given, device: torch.device) -> float:
    """The shortest of repeated calls."""
    arguments = tuple(map(given.of, call.arguments))
    return best_seconds(lambda: function(*arguments), device)


def _words(call: Call) -> str:
    """Rows, and the matrix or the width."""
    rows = len(call.result)
    weights = [value for value in call.arguments if isinstance(value, PackedWeight)]
    if weights:
        return f"{rows} x {weights[0].num_columns} -> {weights[0].num_rows}"
    return f"{rows} x {call.result[0].numel()}"


def _bytes(call: Call, given: _Given) -> int:
    """What has to be read and written at least: weights once, of an embedding the rows that are looked up."""
    values = [given.of(value) for value in call.arguments]
    total = call.result.numel() * given.hidden.itemsize
    for value in values:
        if isinstance(value, PackedWeight):
            rows = len(call.result) if call.operation == "embedding" else value.num_rows
            total += value.num_bytes * rows // value.num_rows
        elif isinstance(value, Tensor):
            total += value.nbytes
    return total + _keys(call) * given.kv_bytes + _states(call)


def _keys(call: Call) -> int:
    """Numbers of keys and values that attention reads."""
    if call.operation not in ("paged_attention", "latent_attention"):
        return 0
    batch = next(value for value in call.arguments if isinstance(value, Batch))
    cache = next(value for value in call.arguments if isinstance(value, KVLayer | LatentLayer))
    return sum(pool[0].numel() for pool in cache.pools) // batch.block_size * int(batch.kv_lens_S.sum())


def _states(call: Call) -> int:
    """Bytes of states that are read and written: one of each for a run."""
    total = 0
    for state, runs in zip(_of(call, StateLayer), _of(call, Runs), strict=True):
        pool = state.conv_NPC if call.operation == "short_conv" else state.delta_NHKV
        total += 2 * len(runs.reads_G) * pool[0].nbytes
    return total


def _of(call: Call, kind: type[T]) -> list[T]:
    return [value for value in call.arguments if isinstance(value, kind)]


def _flops(call: Call) -> int:
    """Of products: two for each number of the matrix and row, and for each query and key twice the channels; with each
    number of a head's state a row has three."""
    rows = len(call.result)
    for state in _of(call, StateLayer):
        if call.operation == "short_conv":
            return 2 * (state.conv_NPC.shape[1] + 1) * call.result.numel()
        return 6 * rows * state.delta_NHKV[0].numel()
    for value in call.arguments:
        if isinstance(value, PackedWeight):
            return 0 if call.operation == "embedding" else 2 * rows * value.num_rows * value.num_columns
    if call.operation not in ("paged_attention", "latent_attention"):
        return 0
    batch = next(value for value in call.arguments if isinstance(value, Batch))
    pairs = int((batch.query_starts_S1.diff() * batch.kv_lens_S).sum())
    return 4 * pairs * call.result[0].numel()
