"""Watches the product compute: a decoder like the one that serves, but operation by operation, whose results at every
place are kept, and replaced by the reference's where that is wanted. Process of `firstlight align`.

Where results are replaced, each operation is given exactly what the reference's was, so its error is its own and not
inherited: of an error at several places the first is the cause.

Legend: T tokens of a step, L tokens of all prompts, C hidden size, E = (H + 2 G) D as in `ops.registry`.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from model_runtime.align.measure import row_order
from model_runtime.align.places import Named, Part, input_kind, named_parameters
from model_runtime.align.reference import Reference
from model_runtime.batch import Batch
from model_runtime.blocks.moe import MixtureOfExperts, route
from model_runtime.caches import Caches
from model_runtime.kv_store import KVLayer
from model_runtime.latent_store import LatentLayer
from model_runtime.models.decoder import Decoder, decoder_table
from model_runtime.models.layer import EagerLayers, Layer
from model_runtime.ops.reference import split_heads
from model_runtime.ops.registry import HeadShape, Ops, PackedWeight, RopeTable
from model_runtime.weights.table import Parameters


@dataclass(slots=True, kw_only=True)
class Taken:
    """What the product computed at a place."""

    kind: str
    """Of operation: linear, norm, rope, attention, activation, router, routing, experts, residual, embedding."""
    operation: str
    """For people: the operation and the parameter."""
    values: Tensor
    """float32 [L, width] on CPU; NaN where nothing was computed, as in columns of other ranks."""
    order: int
    """Of the first time."""


@dataclass(slots=True)
class Recorder:
    """Keeps what is computed at the reference's places."""

    reference: Reference
    is_forced: bool
    """Results are replaced by the reference's once they are kept."""
    taken: dict[str, Taken] = field(default_factory=dict)
    rows_T: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Of the step, among those of all prompts."""

    def take(self, place: str, found_TX: Tensor, kind: str, operation: str, there: slice = slice(None)) -> None:
        """Keep rows of a place, of which this rank has the columns `there`. What computing goes on with is written into
        the tensor."""
        expected_LX = self.reference.at(place)
        if expected_LX is None:
            return
        if place not in self.taken:
            values = torch.full_like(expected_LX, torch.nan)
            self.taken[place] = Taken(kind=kind, operation=operation, values=values, order=len(self.taken))
        # of another width, when the reference has another architecture
        width = min(found_TX.shape[1], expected_LX[:, there].shape[1])
        kept = self.taken[place].values[:, there]
        kept[:, :width].index_copy_(0, self.rows_T, found_TX[:, :width].float().cpu())
        if self.is_forced and found_TX.shape[1] == expected_LX[:, there].shape[1]:
            found_TX.copy_(expected_LX[:, there].index_select(0, self.rows_T))

    def take_all(self, place: str, found_TX: Tensor, kind: str, operation: str) -> None:
        """The same of a place of the image tower, which may have its rows in another order; that of the embeddings it
        gives is compared where they stand for tokens."""
        expected = self.reference.at(place)
        if expected is None or expected.shape != found_TX.shape:
            return
        rows_T, self.rows_T = self.rows_T, row_order(found_TX.float().cpu(), expected)
        self.take(place, found_TX, kind, operation)
        self.rows_T = rows_T


class TracedOps:
    """Operations that tell a recorder. `layer` is the one that runs."""

    def __init__(self, decoder: Decoder, recorder: Recorder) -> None:
        self._ops, self._recorder = decoder.ops, recorder
        table = decoder_table(decoder.config)
        self._names = _by_identity(decoder.parameters, named_parameters(table, decoder.share))
        if decoder.head is not None:
            self._names[id(decoder.head)] = _head(decoder)
        self._share, self._config = decoder.share, decoder.config
        self.layer = 0

    def ops(self) -> Ops:
        """For a decoder."""
        return replace(
            self._ops,
            linear=self._linear,
            rms_norm=self._norm("rms_norm", self._ops.rms_norm),
            layer_norm=self._norm("layer_norm", self._ops.layer_norm),
            qk_norm=self._qk_norm,
            rope_and_cache=self._rope_and_cache,
            rope_and_cache_latent=self._rope_and_cache_latent,
            layer_program=lambda layers, collectives, sharers: None,
        )

    def _taken(self, parts: tuple[Part, ...], out_TN: Tensor, kind: str, operation: str) -> None:
        for part in parts:
            self._recorder.take(f"{part.path}.out", out_TN[:, part.own], kind, operation, part.there)

    def _linear(self, x_TK: Tensor, weight: PackedWeight, bias_N: Tensor | None) -> Tensor:
        named = self._names.get(id(weight))
        if named is None:
            return self._ops.linear(x_TK, weight, bias_N)
        name, kind = named.parameter.removesuffix(".weight"), input_kind(named.parameter)
        for part in named.parts[:1]:
            there = slice(None) if named.input_there is None else named.input_there
            self._recorder.take(f"{part.path}.in", x_TK, kind, f"{kind}, input of {name}", there)
        out_TN = self._ops.linear(x_TK, weight, bias_N)
        if named.input_there is None:
            self._taken(named.parts, out_TN, "router" if name.endswith("router") else "linear", f"linear {name}")
        return out_TN

    def _norm(self, kind: str, norm: Callable[[Tensor, Tensor, float], Tensor]) -> Callable[..., Tensor]:
        def traced(x_TK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
            named = self._names.get(id(weight_K))
            if named is None:
                return norm(x_TK, weight_K, eps)
            self._recorder.take(f"{named.parts[0].path}.in", x_TK, "residual", f"input of {named.parameter}")
            out_TK = norm(x_TK, weight_K, eps)
            self._taken(named.parts, out_TK, "norm", f"{kind} {named.parameter}")
            return out_TK

        return traced

    def _qk_norm(self, qkv_TE: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, shape: HeadShape) -> None:
        self._ops.qk_norm(qkv_TE, q_weight, k_weight, eps, shape)
        names = [self._names.get(id(weight)) for weight in (q_weight, k_weight)]
        paths = [None if named is None else named.parts[0].path for named in names]
        self._take_heads(qkv_TE, shape, paths, "qk_norm")

    def _rope_and_cache(self, qkv_TE: Tensor, rope: RopeTable, batch: Batch, kv: KVLayer, shape: HeadShape) -> None:
        self._ops.rope_and_cache(qkv_TE, rope, batch, kv, shape)
        name = f"layers.{self.layer}.self_attn"
        self._take_heads(qkv_TE, shape, [f"{name}.q_rope", f"{name}.k_rope"], "rope")
        if self._recorder.is_forced:
            self._ops.rope_and_cache(qkv_TE, _still(rope), batch, kv, shape)

    def _rope_and_cache_latent(
        self, query_THX: Tensor, row_TX: Tensor, rope: RopeTable, batch: Batch, kv: LatentLayer
    ) -> None:
        """Of the channels that all heads share."""
        self._ops.rope_and_cache_latent(query_THX, row_TX, rope, batch, kv)
        shared = row_TX.shape[1] - kv.latent_rank
        there = (self._share.heads.of(self._share.heads.total * shared), slice(None))
        for rows_THX, name, columns in zip((query_THX, row_TX[:, None]), ("q_rope", "k_rope"), there, strict=True):
            path, shared_THR = f"layers.{self.layer}.self_attn.{name}", rows_THX[..., -shared:]
            flat_TX = shared_THR.flatten(1).clone()
            self._recorder.take(f"{path}.out", flat_TX, "rope", f"rope of {path}", columns)
            shared_THR.copy_(flat_TX.view(shared_THR.shape))
        if self._recorder.is_forced:
            self._ops.rope_and_cache_latent(query_THX, row_TX, _still(rope), batch, kv)

    @property
    def _heads(self) -> tuple[slice, slice]:
        """Columns of the queries and keys of all ranks that this one has in the layer."""
        config, share = self._config.of_layer(self.layer), self._share
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return share.heads.of(queries), share.kv_heads.of(keys)

    def _take_heads(self, qkv_TE: Tensor, shape: HeadShape, paths: Sequence[str | None], kind: str) -> None:
        """Queries and keys."""
        for heads_THD, path, there in zip(split_heads(qkv_TE, shape)[:2], paths, self._heads, strict=True):
            if path is not None:
                columns_TX = heads_THD.view(len(heads_THD), -1)
                self._recorder.take(f"{path}.out", columns_TX, kind, f"{kind} of {path}", there)


def _still(rope: RopeTable) -> RopeTable:
    """One that changes nothing."""
    ones, zeros = torch.ones_like(rope.cos_PR2), torch.zeros_like(rope.sin_PR2)
    return replace(rope, cos_PR2=ones, sin_PR2=zeros, growth_P=None)


class _TracedMixture:
    """A mixture of experts that tells which experts it chose and what they gave together."""

    def __init__(self, inner: MixtureOfExperts, name: str, recorder: Recorder, is_whole: bool) -> None:
        self._inner, self._name, self._recorder, self._is_whole = inner, name, recorder, is_whole

    def forward(self, ops: Ops, x_TC: Tensor) -> Tensor:
        logits: list[Tensor] = []

        def linear(x_TK: Tensor, weight: PackedWeight, bias_N: Tensor | None) -> Tensor:
            out_TN = ops.linear(x_TK, weight, bias_N)
            if weight is self._inner.router.weight:
                logits.append(out_TN)
            return out_TN

        out_TC = self._inner.forward(replace(ops, linear=linear), x_TC)
        chosen = route(ops, logits[0], self._inner.choice_bias_N, self._inner.config)
        weights_TN = torch.zeros_like(logits[0]).scatter_(1, chosen.expert_TK, chosen.weight_TK)
        self._recorder.take(f"{self._name}.routing.out", weights_TN, "routing", f"routing of {self._name}")
        if self._is_whole:
            self._recorder.take(f"{self._name}.out", out_TC, "experts", f"experts of {self._name}")
        return out_TC


class _TracedLayers:
    """A `LayerStack`: layer by layer."""

    def __init__(self, decoder: Decoder, ops: TracedOps, recorder: Recorder) -> None:
        self._traced, self._recorder = ops, recorder
        self._first = decoder.share.layers.start
        layers = [self._layer(layer, index, decoder) for index, layer in enumerate(decoder.layers)]
        self._layers = EagerLayers(ops.ops(), layers)

    def _layer(self, layer: Layer, index: int, decoder: Decoder) -> Layer:
        if not isinstance(layer.mlp, MixtureOfExperts):
            return layer
        traced = copy.copy(layer)
        name = f"layers.{self._first + index}.mlp"
        traced.mlp = _TracedMixture(layer.mlp, name, self._recorder, decoder.collectives.size == 1)
        return traced

    def run(self, x_TC: Tensor, layers: range, ropes: tuple[RopeTable, RopeTable], batch: Batch, kv: Caches) -> Tensor:
        for index in layers:
            number = self._traced.layer = self._first + index
            kind = "residual" if number else "embedding"
            self._recorder.take(f"layers.{number}.in", x_TC, kind, f"input of layers.{number}")
            x_TC = self._layers.run(x_TC, range(index, index + 1), ropes, batch, kv)
            self._recorder.take(f"layers.{number}.out", x_TC, "residual", f"result of layers.{number}")
        return x_TC


def traced_decoder(decoder: Decoder, recorder: Recorder) -> Decoder:
    """The same weights, run so that the recorder sees it."""
    ops = TracedOps(decoder, recorder)
    traced = copy.copy(decoder)
    traced.ops = ops.ops()
    traced.stack = _TracedLayers(decoder, ops, recorder)
    return traced


def _by_identity(parameters: Parameters, named: Mapping[str, Named]) -> dict[int, Named]:
    holders: dict[str, object] = {**parameters.matrices, **parameters.vectors}
    return {id(holder): named[name] for name, holder in holders.items() if name in named}


def _head(decoder: Decoder) -> Named:
    """The output matrix, which may be the embedding."""
    tokens = decoder.share.vocabulary
    part = Part(path="lm_head", own=slice(0, tokens.count), there=slice(tokens.start, tokens.stop))
    return Named(parameter="head.weight", parts=(part,), input_there=None)
