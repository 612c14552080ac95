"""All dense layers of a decoder in one call of the compiled kernels: a step does not return to Python between them.
Registered for 'cpu'; engine and worker processes.

Made once by the decoder through `Ops.layer_program`, run once a step or, where images add features after the first
layers, once for each of these.
"""

from collections.abc import Sequence
from ctypes import Array, addressof, byref, sizeof

import torch
from torch import Tensor

from model_runtime.batch import Batch
from model_runtime.caches import Caches, keys_and_values
from model_runtime.kernels.library import library
from model_runtime.ops.cpu import assert_plain, storage
from model_runtime.ops.cpu_attention import growth_pointer, kv_arguments, norms_whole_rows, sight, sinks_pointer
from model_runtime.ops.program_structures import (
    CHeads,
    CKVLayer,
    CLayer,
    CLowRank,
    CMatrix,
    CRope,
    CScoring,
    CSharedRows,
    CStep,
    CStepBatch,
)
from model_runtime.ops.registry import DenseLayer, HeadShape, LayerStack, Linear, LowRank, RopeTable, register
from model_runtime.parallel import Collectives
from model_runtime.shared_collectives import SharedMemoryCollectives


class LayerProgram:
    """A `LayerStack` in compiled code. Keeps the addresses of weights and of the KV cache."""

    def __init__(
        self,
        layers: Sequence[DenseLayer],
        ranks: SharedMemoryCollectives | None,
        sharers: SharedMemoryCollectives | None,
    ) -> None:
        """`ranks` sum what each has of a block's result, `sharers` have other tokens of the sequences; None: nobody."""
        self._ranks, self._sharers, self._layers = ranks, sharers, tuple(layers)
        """Holds, as `_changes` does, the memory that `_structures` point to."""
        self._changes = [[_changes(changes) for changes in layer.changes] for layer in layers]
        self._structures = (CLayer * len(layers))(*map(_layer, layers, self._changes))
        self._kv: Caches = []
        self._caches = (CKVLayer * 0)()

    def run(self, x_TC: Tensor, layers: range, ropes: tuple[RopeTable, RopeTable], batch: Batch, kv: Caches) -> Tensor:
        """[T, C] -> [T, C], in place. Numbers from the batch that index memory are checked."""
        num_tokens = batch.num_tokens
        assert x_TC.shape == (num_tokens, self._structures[0].output.N), f"hidden states are {tuple(x_TC.shape)}"
        assert 0 <= layers.start < layers.stop <= len(self._layers) and layers.step == 1, f"there are no {layers}"
        self._bind(kv, batch.block_size)
        size = library().workspace(byref(self._structures), len(self._structures), num_tokens)
        workspace = torch.empty(size, dtype=torch.uint8)
        collective = None if self._ranks is None else addressof(self._ranks.structure)
        tables = (_rope(rope, self._layers[0].shape) for rope in ropes)
        step = CStep(_batch(batch), *tables, workspace.data_ptr(), collective)
        if batch.adapted_A is not None:
            step.adapted, step.num_adapted = batch.adapted_A.data_ptr(), len(batch.adapted_A)
        shared = self._shared_rows(batch)
        if shared is not None:
            size = library().shared_workspace(byref(self._structures), len(self._structures), byref(shared))
            shared_workspace = torch.empty(size, dtype=torch.uint8)
            step.shared, step.shared_workspace = addressof(shared), shared_workspace.data_ptr()
        failed = library().run_layers(
            byref(self._structures, layers.start * sizeof(CLayer)),
            byref(self._caches, layers.start * sizeof(CKVLayer)),
            len(layers),
            byref(step),
            _pointer(x_TC),
        )
        assert failed >= 0, (
            "a position, slot, block or key of the batch is outside the rope table, the KV cache or its sequence"
        )
        for group in (self._ranks, self._sharers):
            if group is not None:
                group.check(failed)
        return x_TC

    def _shared_rows(self, batch: Batch) -> CSharedRows | None:
        """Points to tensors of the batch."""
        rows, sharers = batch.shared, self._sharers
        assert (rows is None) == (sharers is None), "a step is divided among ranks that are not there, or not divided"
        if rows is None or sharers is None:
            return None
        keys = rows.keys
        arrays = (keys.query_starts_S1, keys.kv_lens_S, keys.block_tables, keys.table_starts_S)
        pointers = (*(array.data_ptr() for array in arrays), None, None, keys.ends_T.data_ptr())
        groups = CStepBatch(*pointers, len(rows.positions_T), len(keys.kv_lens_S), batch.block_size)
        structure = addressof(sharers.structure)
        return CSharedRows(structure, rows.counts_N.data_ptr(), rows.positions_T.data_ptr(), groups)

    def _bind(self, kv: Caches, block_size: int) -> None:
        """Take the addresses of a KV cache unless they are known: the runner has one, whose tensors stay."""
        if kv is self._kv:
            return
        assert len(kv) == len(self._layers), f"{len(kv)} caches for {len(self._layers)} layers"
        caches = (
            CKVLayer(*kv_arguments(cache, block_size, layer.shape))
            for cache, layer in zip(map(keys_and_values, kv), self._layers, strict=True)
        )
        self._kv, self._caches = kv, (CKVLayer * len(kv))(*caches)


@register("layer_program", "cpu")
def layer_program(layers: Sequence[DenseLayer], collectives: Collectives, sharers: Collectives) -> LayerStack | None:
    """Every layer in one call, unless ranks would have to meet outside of it, rows for attention and for the
    feed-forward block beside it would be of two kinds, or sinks would have to be merged."""
    if any(layer.parallel and layer.qkv.weight.row_bits != layer.gate_up.weight.row_bits for layer in layers):
        return None
    if sharers.size > 1 and any(layer.scoring.sinks_H is not None for layer in layers):
        return None
    others = [group for group in (collectives, sharers) if group.size > 1]
    if not all(isinstance(group, SharedMemoryCollectives) for group in others):
        return None
    return LayerProgram(layers, _in_memory(collectives), _in_memory(sharers))


def _in_memory(group: Collectives) -> SharedMemoryCollectives | None:
    return group if isinstance(group, SharedMemoryCollectives) else None


def _pointer(tensor: Tensor | None) -> int | None:
    """Address of contiguous float32 numbers."""
    if tensor is None:
        return None
    assert_plain(tensor)
    return tensor.data_ptr()


def _matrix(linear: Linear) -> CMatrix:
    weight, bias = linear.weight, linear.bias
    assert bias is None or bias.numel() == weight.num_rows, "a bias has a number for each output"
    sizes = (weight.num_rows, weight.num_columns)
    return CMatrix(weight.data.data_ptr(), _pointer(bias), storage(weight), *sizes, weight.row_bits)


def _changes(changes: Sequence[LowRank]) -> "Array[CLowRank]":
    pairs = ([_matrix(Linear(weight, None)) for weight in (each.down, each.up)] for each in changes)
    every = (CLowRank(*pair, each.first, each.scale) for pair, each in zip(pairs, changes, strict=True))
    return (CLowRank * len(changes))(*every)


def _layer(layer: DenseLayer, changes: "Sequence[Array[CLowRank]]") -> CLayer:
    """Points to its changes."""
    shape, norms, scoring = layer.shape, layer.head_norms, layer.scoring
    query_rows, width = shape.num_heads * shape.head_dim, layer.output.weight.num_rows
    assert layer.qkv.weight.num_rows == query_rows + 2 * shape.num_kv_heads * shape.head_dim
    assert layer.output.weight.num_columns == query_rows
    assert layer.gate_up.weight.num_rows == 2 * layer.down.weight.num_columns
    assert {layer.qkv.weight.num_columns, layer.gate_up.weight.num_columns, layer.down.weight.num_rows} == {width}
    assert norms is None or norms.eps == layer.eps
    return CLayer(
        *(_matrix(linear) for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)),
        _pointer(layer.attention_norm_C),
        _pointer(layer.attention_result_norm_C),
        _pointer(layer.mlp_norm_C),
        _pointer(layer.mlp_result_norm_C),
        None if norms is None else _pointer(norms.query),
        None if norms is None else _pointer(norms.key),
        CHeads(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.absent_heads[0], shape.group_size),
        CScoring(scoring.scale, scoring.softcap, sight(scoring), sinks_pointer(scoring, shape)),
        norms is not None and norms_whole_rows(norms.query, norms.key, shape),
        layer.other_rope,
        layer.activation == "gelu_tanh",
        layer.norm == "layer",
        layer.parallel,
        layer.residual_scale,
        layer.eps,
        *(part for array in changes for part in (addressof(array), len(array))),
    )


def _rope(rope: RopeTable, shape: HeadShape) -> CRope:
    num_positions, half = rope.cos_PR2.shape
    assert 2 * half <= shape.head_dim, f"{2 * half} rotated channels in a head of {shape.head_dim}"
    cos, sin = _pointer(rope.cos_PR2), _pointer(rope.sin_PR2)
    return CRope(cos, sin, num_positions, 2 * half, rope.interleaved, growth_pointer(rope))


def _batch(batch: Batch) -> CStepBatch:
    return CStepBatch(
        batch.query_starts_S1.data_ptr(),
        batch.kv_lens_S.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.table_starts_S1.data_ptr(),
        batch.rope_rows_T.data_ptr(),
        batch.slots_T.data_ptr(),
        None if batch.visible_ends_T is None else batch.visible_ends_T.data_ptr(),
        batch.num_tokens,
        batch.num_sequences,
        batch.block_size,
    )
