"""Sequences shared by ranks (context parallelism): who has which position, what one rank has of a step, and attention
of all rows over all keys. Called by the executor and the runner, engine and worker processes.

The scheduler's block has the tokens of a KV block of every rank, rank after rank. So each rank has a stripe of every
size * width positions: long prompts and long contexts divide evenly, and causal attention too. A token is computed by
the rank that has its position, keys and values stay there, and nothing is held twice. In attention queries travel:
every rank gets all of the step's, whose size does not grow with the context, makes a state of what each sees among its
own keys, and sends it back to whom the row belongs, who merges the states in the order of ranks. A row's result depends
on its position and its sequence alone.

Legend: T tokens of the step, S sequences, N ranks, C hidden size, H query heads, D channels of a head, X = D + 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_runtime.batch import Batch, ImageRows, KeyRanges, SharedRows
from model_runtime.kv_store import KVLayer
from model_runtime.latent_store import LatentLayer
from model_runtime.ops.registry import DenseLayer, HeadShape, LayerStack, Ops, Scoring
from model_runtime.parallel import Collectives


@dataclass(frozen=True, slots=True)
class Stripes:
    """How positions are dealt to the ranks, in stripes of the tokens of a KV block."""

    rank: int
    size: int
    width: int

    @property
    def block_size(self) -> int:
        """Tokens of a block of all ranks together, as the scheduler counts."""
        return self.size * self.width

    def owners(self, positions: Tensor) -> Tensor:
        """Whose a position or slot is."""
        return positions // self.width % self.size

    def before(self, positions: Tensor) -> Tensor:
        """How many of this rank's positions come before these."""
        rest = positions % self.block_size - self.rank * self.width
        return positions // self.block_size * self.width + rest.clamp(0, self.width)

    def own_slots(self, slots: Tensor) -> Tensor:
        """Where in this rank's cache its slots of all ranks' blocks are."""
        return slots // self.block_size * self.width + slots % self.width


class SharedSequences:
    """What a rank does with the others of its context group; with one rank, nothing."""

    def __init__(self, collectives: Collectives, width: int) -> None:
        """`width` is the number of tokens in a KV block of a rank."""
        self._collectives = collectives
        self.stripes = Stripes(collectives.rank, collectives.size, width)

    def divided(self, batch: Batch) -> Batch:
        """This rank's part of a step."""
        return batch if self.stripes.size == 1 else divided(batch, self.stripes)

    def together(self, own_TC: Tensor, batch: Batch) -> Tensor:
        """[T, C]: rows of all ranks in the order of the step; `batch` is this one's part."""
        if batch.shared is None:
            return own_TC
        rows_TC = self._collectives.gather_rows(own_TC, batch.shared.counts_N.tolist())
        return torch.empty_like(rows_TC).index_copy_(0, batch.shared.order_T, rows_TC)

    def own_rows(self, hidden_TC: Tensor, batch: Batch) -> Tensor:
        """This rank's part of what `together` gives."""
        if batch.shared is None:
            return hidden_TC
        parts = torch.split(batch.shared.order_T, batch.shared.counts_N.tolist())
        return hidden_TC[parts[self.stripes.rank]]

    def ops(self, ops: Ops) -> Ops:
        """Operations whose attention is over the keys of all ranks."""
        if self.stripes.size == 1:
            return ops
        attention, sharers = SharedAttention(ops, self._collectives, self.stripes), self._collectives
        latent_attention = SharedLatentAttention(ops, self._collectives)

        def program(layers: Sequence[DenseLayer], ranks: Collectives, nobody: Collectives) -> LayerStack | None:
            assert nobody.size == 1, "sequences are divided twice"
            return ops.layer_program(layers, ranks, sharers)

        return replace(ops, paged_attention=attention, latent_attention=latent_attention, layer_program=program)


class SharedAttention:
    """`Ops.paged_attention` of rows over the keys of all ranks."""

    def __init__(self, ops: Ops, collectives: Collectives, stripes: Stripes) -> None:
        self._ops, self._collectives, self._stripes = ops, collectives, stripes

    def __call__(self, qkv_TE: Tensor, kv: KVLayer, batch: Batch, shape: HeadShape, scoring: Scoring) -> Tensor:
        """[own T, H D] for this rank's rows."""
        shared = batch.shared
        assert shared is not None, "a step that is not divided"
        query_TC = qkv_TE[:, : shape.num_heads * shape.head_dim]
        all_TC = self._collectives.gather_rows(query_TC, shared.counts_N.tolist())
        states_THX = self._ops.partial_attention(all_TC, kv, self._keys(shared, scoring), shape, scoring)
        states_NTHX = _states_of_own_rows(states_THX, shared, self._collectives)
        if scoring.sinks_H is not None:
            states_NTHX = _with_sinks(states_NTHX, scoring.sinks_H)
        return self._ops.merge_attention(states_NTHX).to(qkv_TE.dtype)

    def _keys(self, shared: SharedRows, scoring: Scoring) -> KeyRanges:
        if not scoring.window and not scoring.chunk:
            return shared.keys
        return replace(shared.keys, begins_T=self._stripes.before(scoring.begins(shared.positions_T)))


class SharedLatentAttention:
    """`Ops.latent_attention` of rows over the latent vectors of all ranks."""

    def __init__(self, ops: Ops, collectives: Collectives) -> None:
        self._ops, self._collectives = ops, collectives

    def __call__(self, query_THX: Tensor, kv: LatentLayer, batch: Batch, scale: float) -> Tensor:
        """[own T, H, L] for this rank's rows."""
        shared = batch.shared
        assert shared is not None, "a step that is not divided"
        all_TX = self._collectives.gather_rows(query_THX.flatten(1), shared.counts_N.tolist())
        all_THX = all_TX.view(len(all_TX), *query_THX.shape[1:])
        states_THX = self._ops.partial_latent_attention(all_THX, kv, shared.keys, scale)
        mixed_TC = self._ops.merge_attention(_states_of_own_rows(states_THX, shared, self._collectives))
        return mixed_TC.view(*query_THX.shape[:2], kv.latent_rank).to(query_THX.dtype)


def _states_of_own_rows(states_THX: Tensor, shared: SharedRows, collectives: Collectives) -> Tensor:
    """[N, own T, H, X]: what each rank has made of this rank's rows, from what this one has made of all."""
    counts = shared.counts_N.tolist()
    parts_HX = collectives.all_to_all(states_THX, [counts] * collectives.size)
    return parts_HX.view(collectives.size, counts[collectives.rank], *parts_HX.shape[1:])


def _with_sinks(states_NTHX: Tensor, sinks_H: Tensor) -> Tensor:
    """With one more part: a score of weight 1 for each head, which nothing is mixed by."""
    part_1THX = torch.zeros_like(states_NTHX[:1])
    part_1THX[..., -2], part_1THX[..., -1] = sinks_H, 1.0
    return torch.cat((states_NTHX, part_1THX))


def divided(batch: Batch, stripes: Stripes) -> Batch:
    """A rank's part of the step: its rows, in order, and where their keys and values go; and beside these what all rows
    see of its keys."""
    owner_T = stripes.owners(batch.positions_T)
    is_own_T = owner_T == stripes.rank
    own_T = is_own_T.nonzero().flatten()
    starts_S1 = is_own_T.cumsum(0, dtype=torch.int32)[batch.query_starts_S1[1:] - 1]
    rope = batch.rope_positions_T3
    return replace(
        batch,
        token_ids_T=batch.token_ids_T[own_T],
        positions_T=batch.positions_T[own_T],
        slots_T=stripes.own_slots(batch.slots_T[own_T]),
        query_starts_S1=torch.cat((starts_S1.new_zeros(1), starts_S1)),
        kv_lens_S=stripes.before(batch.kv_lens_S),
        block_size=stripes.width,
        rope_rows_T=batch.rope_rows_T[own_T],
        rope_positions_T3=None if rope is None else rope[own_T],
        visible_ends_T=None,
        adapted_A=None if batch.adapted_A is None else torch.isin(own_T, batch.adapted_A).nonzero().flatten(),
        images=tuple(part for images in batch.images if (part := _own_images(images, is_own_T)) is not None),
        shared=_shared_rows(batch, owner_T, stripes),
    )


def _shared_rows(batch: Batch, owner_T: Tensor, stripes: Stripes) -> SharedRows:
    """Rows in the order of ranks: those of a sequence are one group a rank, which has the sequence's blocks."""
    size, num_sequences = stripes.size, batch.num_sequences
    order_T = owner_T.argsort(stable=True)
    sequence_T = torch.arange(num_sequences).repeat_interleave(batch.query_starts_S1.diff())
    lengths = (owner_T * num_sequences + sequence_T).bincount(minlength=size * num_sequences)
    positions_T = batch.positions_T[order_T]
    ends_T = positions_T + 1 if batch.visible_ends_T is None else batch.visible_ends_T[order_T]
    keys = KeyRanges(
        query_starts_S1=torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int(),
        kv_lens_S=stripes.before(batch.kv_lens_S).repeat(size),
        block_tables=batch.block_tables,
        table_starts_S=batch.table_starts_S1[:-1].repeat(size),
        begins_T=torch.zeros_like(positions_T),
        ends_T=stripes.before(ends_T),
    )
    return SharedRows(counts_N=owner_T.bincount(minlength=size), order_T=order_T, positions_T=positions_T, keys=keys)


def _own_images(images: ImageRows, is_own_T: Tensor) -> ImageRows | None:
    """Those rows of an image that this rank computes, which lie together there too."""
    own_N = is_own_T[images.start : images.start + len(images.embeddings_NC)].nonzero().flatten()
    if not len(own_N):
        return None
    return ImageRows(
        start=int(is_own_T[: images.start].sum()),
        embeddings_NC=images.embeddings_NC[own_N],
        deepstack_NC=tuple(level_NC[own_N] for level_NC in images.deepstack_NC),
    )
