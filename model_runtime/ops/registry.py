"""The operations that models and the runner are made of, and which implementation runs where.

Models call `ops.linear(...)`; they never see a kernel. `reference.py`, `matrices.py`, `latent.py`, `delta.py` and
`sampling.py` define the meaning of every operation in plain torch, for any device and float type; `cpu*.py` and
`delta.py` register compiled ones for float32 on CPU. `select` picks, for each operation, the best one registered for a
device and falls back to the reference. Engine and worker processes.

Legend: T tokens, K input features, N output features, H query heads, G key/value heads, D channels of a head,
E = (H + 2 G) D, F intermediate features, P positions of the rope table, R rotated channels; N rows of logits,
V vocabulary. Of a delta rule: G query and key heads of K channels, H value heads of V channels. X numbers of a row of
latent attention, of which the first L are the latent vector.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from model_runtime.batch import Batch, KeyRanges, Runs
from model_runtime.caches import Caches
from model_runtime.kv_store import KVLayer
from model_runtime.latent_store import LatentLayer
from model_runtime.parallel import Collectives
from model_runtime.quantized import QuantizedFormat, QuantizedMatrix, RowBits
from model_runtime.state_store import StateLayer
from scheduler.plan import RowLogprobs, SampleRows, ScoreRows

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "tanh", "exp", "sigmoid", "softplus"]
GatedActivation = Literal["silu", "gelu_tanh"]


PANEL_ROWS = 16
"""Rows of a matrix that implementations may pack together."""


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """What a matrix [N, K] is packed from."""

    num_rows: int
    num_columns: int
    stored: torch.dtype | QuantizedFormat
    """Floats of a type, or integers of a format."""
    row_bits: RowBits = 0
    """As in PackedWeight, for a matrix of integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A matrix [N, K] in the layout of the implementation that packed it. Only `linear` and `embedding` of the same
    implementation read `data`."""

    data: Tensor
    num_rows: int
    """N: output features."""
    num_columns: int
    """K: input features."""
    quantized: QuantizedFormat | None = None
    """The format of integers; None: the dtype of `data` says how numbers are stored."""
    row_bits: RowBits = 0
    """Of the integers that rows become before a product (`quantized.quantize_rows`); 0: none, as beside floats."""

    @property
    def num_bytes(self) -> int:
        """Memory that the packed form takes."""
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True, slots=True)
class Linear:
    """Weight and optional bias [N] float32 of a linear layer."""

    weight: PackedWeight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LowRank:
    """A change of a product y = x W^T: x down^T up^T, times `scale`, is added to columns of y from `first` on."""

    down: PackedWeight
    up: PackedWeight
    first: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """How a fused query/key/value row of E numbers is cut: H D query, then G D key, then G D value channels."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    absent_heads: tuple[int, int] = (0, 0)
    """Query heads that the first group, at its beginning, and the last group, at its end, have less than the others."""

    @property
    def group_size(self) -> int:
        """Query heads of a whole group."""
        size, rest = divmod(self.num_heads + sum(self.absent_heads), self.num_kv_heads)
        assert rest == 0 and max(self.absent_heads) < size, f"{self} is not cut into groups"
        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTable:
    """Cosines and sines by position, float32, the attention factor multiplied in."""

    cos_PR2: Tensor
    """[P, R / 2]"""
    sin_PR2: Tensor
    interleaved: bool
    growth_P: Tensor | None = None
    """[P] float32: what rotated queries are multiplied with, if not with 1."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS-norm weights of queries and keys: of a head [D], or of all heads together [H D] and [G D]."""

    query: Tensor
    key: Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How a query weighs keys."""

    scale: float
    """What its products with them are multiplied with."""
    window: int = 0
    """> 0: a query at p sees keys from p - window + 1 on."""
    chunk: int = 0
    """> 0, where there is no window: it sees keys from the last multiple of chunk on."""
    softcap: float = 0.0
    """> 0: a score s becomes softcap * tanh(s / softcap)."""
    sinks_H: Tensor | None = None
    """One more score for each query head, float32, which no value belongs to."""

    def begins(self, positions: Tensor) -> Tensor:
        """The first key that queries at these positions see."""
        if self.chunk:
            return positions - positions % self.chunk
        return (positions + 1 - self.window).clamp(min=0) if self.window else torch.zeros_like(positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """A layer of grouped-query attention and a gated feed-forward block, as data. What it computes is said by the
    decoder's layer and its blocks."""

    eps: float
    norm: Literal["rms", "layer"]
    attention_norm_C: Tensor | None
    attention_result_norm_C: Tensor | None
    mlp_norm_C: Tensor | None
    mlp_result_norm_C: Tensor | None
    parallel: bool
    """The feed-forward block takes what attention takes."""
    residual_scale: float
    qkv: Linear
    head_norms: HeadNorms | None
    shape: HeadShape
    scoring: Scoring
    other_rope: bool
    """Rotates by the second table of a step."""
    output: Linear
    changes: tuple[tuple[LowRank, ...], tuple[LowRank, ...]]
    """Of qkv and of output."""
    gate_up: Linear
    activation: GatedActivation
    down: Linear


class LayerStack(Protocol):
    """The layers of a decoder, ready to run."""

    def run(self, x_TC: Tensor, layers: range, ropes: tuple[RopeTable, RopeTable], batch: Batch, kv: Caches) -> Tensor:
        """[T, C] -> [T, C] through some layers in order; may change x_TC. `ropes` are the step's table and that of the
        layers with other rotations; `kv` has an entry for every layer of the decoder and is never changed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One implementation of every operation. Results are new tensors unless 'in place' is said."""

    empty_matrix: Callable[[MatrixForm, torch.device], PackedWeight]
    """A packed matrix whose rows have yet to be filled. Where rows are not quantised for it, an implementation may keep
    floats instead of integers."""
    fill_rows: Callable[[PackedWeight, int, Tensor | QuantizedMatrix], None]
    """(matrix, first row, rows): rows in the form that the matrix was made for, from a multiple of `PANEL_ROWS` to
    another or to the last row."""
    linear: Callable[[Tensor, PackedWeight, Tensor | None], Tensor]
    """(x [T, K], weight, bias [N] or None) -> [T, N] = x @ weight.T + bias, accumulated in float32 at least."""
    embedding: Callable[[Tensor, PackedWeight], Tensor]
    """(ids int32 [T], table [V, K]) -> [T, K] in the computing dtype."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [T, K], weight [K], eps) -> x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467)."""
    layer_norm: Callable[[Tensor, Tensor, float], Tensor]
    """rms_norm of x - mean(x) (arXiv 1607.06450, without bias)."""
    qk_norm: Callable[[Tensor, Tensor, Tensor, float, HeadShape], None]
    """(qkv [T, E], q_weight, k_weight, eps, shape): rms_norm of each query and key head by weights [D], or of all query
    heads and all key heads of a token by weights [H D] and [G D], in place."""
    rope_and_cache: Callable[[Tensor, RopeTable, Batch, KVLayer, HeadShape], None]
    """(qkv [T, E], rope, batch, kv, shape): rotate queries and keys in place, multiply queries by what they grow with,
    write keys and values to the slots."""
    paged_attention: Callable[[Tensor, KVLayer, Batch, HeadShape, Scoring], Tensor]
    """(qkv [T, E], kv, batch, shape, scoring) -> [T, H D]: causal softmax attention of each query over the keys of its
    own sequence, read through its block table. A query at p sees keys up to p, or where the batch has `visible_ends_T`
    up to that (Gemma 3: the end of the query's image)."""
    partial_attention: Callable[[Tensor, KVLayer, KeyRanges, HeadShape, Scoring], Tensor]
    """(queries [T, H D], kv, ranges, shape, scoring) -> states [T, H, D + 2] of attention over those keys, whatever the
    window: values weighted by exp(score - largest score), the largest score, and the sum of the weights, which is 0
    without keys."""
    linear_heads: Callable[[Tensor, PackedWeight, Tensor], None]
    """(x [T, H, K], weight [H N, K], out [T, H, N]): out = x @ weight.T of each head with its own N rows, as `linear`
    computes it. `out` may be a part of wider rows."""
    rope_and_cache_latent: Callable[[Tensor, Tensor, RopeTable, Batch, LatentLayer], None]
    """(queries [T, H, X], rows [T, X], rope, batch, kv): rotate the last channels of queries and rows in place, write
    rows to the slots."""
    latent_attention: Callable[[Tensor, LatentLayer, Batch, float], Tensor]
    """(queries [T, H, X], kv, batch, scale) -> [T, H, L]: causal softmax attention over the rows of the own sequence,
    which are keys of all heads, and in their first L numbers values."""
    partial_latent_attention: Callable[[Tensor, LatentLayer, KeyRanges, float], Tensor]
    """(queries [T, H, X], kv, ranges, scale) -> states [T, H, L + 2], as `partial_attention` has them; ranges begin
    with the first key."""
    merge_attention: Callable[[Tensor], Tensor]
    """States [N, T, H, D + 2] of N parts of the keys -> [T, H D]: attention over all, merged in the order of parts."""
    silu_mul: Callable[[Tensor], Tensor]
    """[T, 2 F] -> [T, F] = silu(first half) * second half."""
    gelu_tanh_mul: Callable[[Tensor], Tensor]
    """[T, 2 F] -> [T, F] = gelu(first half) * second half, gelu by its approximation with tanh (arXiv 1606.08415)."""
    activate: Callable[[Tensor, Activation], Tensor]
    """(x of any shape, which function) -> the function of every number. quick_gelu is x / (1 + exp(-1.702 x)), softplus
    log(1 + exp(x))."""
    short_conv: Callable[[Tensor, Tensor, StateLayer, Runs], Tensor]
    """(x [T, C], weight [C, W], state, runs) -> [T, C]: silu of each channel's last W inputs times its weights."""
    delta_rule: Callable[[Tensor, Tensor, Tensor, StateLayer, Runs], Tensor]
    """(qkv [T, 2 G K + H V], decay [T, H] or [T, H, K], beta [T, H], state, runs) -> [T, H V]: the gated delta rule
    (arXiv 2412.06464), with a decay for each channel of a key in Kimi Linear (arXiv 2510.26692). Queries and keys are
    divided by their lengths, queries also by sqrt(K); then a head's state S [K, V] becomes S' + k beta (v - S'^T k)^T
    with S' = decay S, and gives S^T q."""
    layer_program: Callable[[Sequence[DenseLayer], Collectives, Collectives], LayerStack | None]
    """(all layers of a decoder, the ranks that have parts of them, those that have other tokens of the sequences)
    -> something that runs them at once, with the results of the operations one by one; None where there is no such
    thing."""
    sample: "Callable[[Tensor, SampleRows], tuple[array[int], RowLogprobs]]"
    """(logits [N, V], how) -> (int32 token ids [N] or FAILED_TOKEN, their log-probabilities): see `sampling`."""
    score: Callable[[Tensor, ScoreRows], RowLogprobs]
    """(logits [N, V], which tokens) -> the log-probabilities of given tokens. `rows` is not read."""

    def pack(self, weight_NK: Tensor) -> PackedWeight:
        """A matrix of floats, where it is, its storage type kept."""
        packed = self.empty_matrix(MatrixForm(len(weight_NK), weight_NK.shape[1], weight_NK.dtype), weight_NK.device)
        self.fill_rows(packed, 0, weight_NK)
        return packed

    def pack_quantized(self, matrix: QuantizedMatrix, row_bits: RowBits) -> PackedWeight:
        """A matrix of integers, where it is; `row_bits` as in PackedWeight."""
        form = MatrixForm(matrix.num_rows, matrix.num_columns, matrix.format, row_bits)
        packed = self.empty_matrix(form, matrix.data_NR.device)
        self.fill_rows(packed, 0, matrix)
        return packed


Function = TypeVar("Function", bound=Callable[..., object])

_implementations: dict[tuple[str, str], Callable[..., object]] = {}


def register(name: str, device_type: str) -> Callable[[Function], Function]:
    """Decorator: this function implements operation `name` on `device_type` ('any' for the reference)."""
    assert name in {f.name for f in fields(Ops)}, f"unknown operation {name}"

    def add(function: Function) -> Function:
        assert (name, device_type) not in _implementations, f"{name} on {device_type} is registered twice"
        _implementations[name, device_type] = function
        return function

    return add


def implementations(name: str) -> dict[str, Callable[..., object]]:
    """Every registered implementation of an operation by device type."""
    return {device: function for (op, device), function in _implementations.items() if op == name}


def select(device_type: str) -> Ops:
    """The operations for a device; pass 'any' to force the reference. Implementations must be imported before."""
    chosen = {
        f.name: _implementations.get((f.name, device_type), _implementations.get((f.name, "any"))) for f in fields(Ops)
    }
    missing = [name for name, function in chosen.items() if function is None]
    assert not missing, f"no implementation of {missing}"
    return Ops(**chosen)  # type: ignore[arg-type]
