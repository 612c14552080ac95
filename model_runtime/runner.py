"""One step on this rank: plan -> images -> ragged batch -> forward -> logits of the rows that need them -> tokens.

Owned by the executor, engine process. Holds the model, the KV memory and the images' embeddings; keeps nothing about
requests.

Legend: T tokens of the step, R rows to sample, P prompt rows to score, C hidden size, V vocabulary.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from model_runtime.batch import Batch, ImageRows, make_batch
from model_runtime.caches import Caches, give_back
from model_runtime.images import ImageStore
from model_runtime.memory.steps import SCORE_CHUNK
from model_runtime.ops.registry import Ops
from model_runtime.parallel import Alone
from model_runtime.pipeline import Stage
from model_runtime.pooling import Norm, pooled_sums
from model_runtime.stripes import SharedSequences
from scheduler.plan import PoolRows, RowLogprobs, SampleRows, ScoreRows, StepPlan, StepResult, doubles, floats, ints


class LanguageModel(Protocol):
    """What the runner needs of a decoder (`models.decoder.Decoder`)."""

    def forward(self, batch: Batch, kv: Caches) -> Tensor:
        """Hidden states [T, C]; writes the step's keys and values to `kv`."""
        ...

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """[R, V] float32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """What computes the steps that are `by_draft_model`."""

    model: LanguageModel
    kv: Caches
    """Of the model's block numbers; the model's own where the draft model is its first layers."""
    normed_SC: Tensor | None = None
    """The output of the model's final norm by slot [S, C], where the draft model goes on from that; of tokens that the
    model has not computed, what the draft model made in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A step whose hidden states are computed, or are on their way through other stages."""

    plan: StepPlan
    model: LanguageModel
    """That the plan wants."""
    whole: Batch
    batch: Batch
    """This rank's part of it."""
    own_TC: Tensor | None
    """Of its rows; None: all come from the last stage."""
    failed_slots: "array[int]"
    """Of images."""


class Runner:
    """Runs plans. The result of a sequence does not depend on the others in the plan."""

    def __init__(
        self,
        model: LanguageModel,
        kv: Caches,
        block_size: int,
        ops: Ops,
        *,
        images: ImageStore | None = None,
        bidirectional_images: bool = False,
        draft: DraftModel | None = None,
        final_norm: Norm | None = None,
        stage: Stage | None = None,
        sequences: SharedSequences | None = None,
        expert_tokens: Callable[[], int] | None = None,
    ) -> None:
        """`block_size` is that of the cache. `images` is None for a model that takes none; `bidirectional_images` says
        that its images attend to themselves in both directions. `final_norm`, of the model, is needed for sequences
        that are pooled. `stage`: the model has some of the layers, and others come after or before. `sequences` are
        shared with other ranks; None: with none. `expert_tokens` counts for a model with experts."""
        self._sequences = SharedSequences(Alone(), block_size) if sequences is None else sequences
        self._model, self._kv, self._ops = model, kv, ops
        self._images, self._bidirectional_images, self._draft = images, bidirectional_images, draft
        self._final_norm, self._stage, self._expert_tokens = final_norm, stage, expert_tokens

    @property
    def expert_tokens(self) -> int:
        """See `RankStats`."""
        return 0 if self._expert_tokens is None else self._expert_tokens()

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute a step. Raises AssertionError where the plan contradicts itself; never because of what the model
        computes: rows that are not finite come back as FAILED_TOKEN, images that are not in `failed_slots`."""
        return self.end(self.begin(plan))

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> "Begun | StepResult":
        """Compute what can be computed before other stages have done their part; a result of what is done then. Steps
        end in the order in which they began."""
        if not plan.token_ids:
            return self._relieve(plan)
        return self._begin(plan)

    @torch.inference_mode()
    def end(self, begun: "Begun | StepResult") -> StepResult:
        """As `run`."""
        if isinstance(begun, StepResult):
            return begun
        plan, hidden_TC = begun.plan, self._end(begun)
        token_ids, sampled = self._sample(begun.model, hidden_TC, plan.sample)
        return StepResult(
            step_id=plan.step_id,
            token_ids=token_ids,
            sampled=sampled,
            scored=self._score(hidden_TC, plan.score),
            failed_slots=begun.failed_slots,
            pooled=self._pool(hidden_TC, plan.pool),
        )

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """This rank's part of a step whose result is rank 0's: its rows or layers, and if it shares the last of these
        with rank 0, its part of the same logits."""
        if self._is_later_stage and plan.by_draft_model:
            return
        begun = self.begin(plan)
        if not self._is_later_stage:
            self.follow_to_end(begun)

    @torch.inference_mode()
    def follow_to_end(self, begun: "Begun | StepResult") -> None:
        """As `follow`, of a step that has begun; of the first stage."""
        if isinstance(begun, StepResult):
            return
        plan, hidden_TC = begun.plan, self._end(begun)
        if self._sequences.stripes.rank > 0:
            return
        if plan.sample.rows:
            _logits(begun.model, hidden_TC, plan.sample.rows)
        for chunk in _score_chunks(plan.score):
            _logits(self._model, hidden_TC, chunk.rows)

    def _relieve(self, plan: StepPlan) -> StepResult:
        """Of a plan without tokens: memory goes back to the system, and nothing is computed."""
        self._image_rows(plan)  # which forgets embeddings
        caches = self._kv if self._draft is None else [*self._kv, *self._draft.kv]
        give_back(caches, plan.free_blocks, plan.free_states)
        nothing = RowLogprobs()
        return StepResult(step_id=plan.step_id, token_ids=ints(), sampled=nothing, scored=nothing)

    @property
    def _is_later_stage(self) -> bool:
        return self._stage is not None and not self._stage.is_first

    def _begin(self, plan: StepPlan) -> Begun:
        """Compute what this rank computes before it needs what other stages make of it."""
        images, failed_slots = self._image_rows(plan)
        whole = make_batch(plan, self._sequences.stripes.block_size, images, self._bidirectional_images)
        batch = self._sequences.divided(whole)
        model, kv = self._model, self._kv
        if plan.by_draft_model:
            assert self._draft is not None, "a step of a draft model, and there is none"
            model, kv = self._draft.model, self._draft.kv
        if self._stage is None or plan.by_draft_model:
            own_TC = model.forward(batch, kv)
        else:
            self._stage.begin(plan, whole, kv)
            own_TC = None
        return Begun(plan=plan, model=model, whole=whole, batch=batch, own_TC=own_TC, failed_slots=failed_slots)

    def _end(self, begun: Begun) -> Tensor:
        """[T, C]"""
        if begun.own_TC is not None:
            hidden_TC = self._sequences.together(begun.own_TC, begun.batch)
        else:
            assert self._stage is not None, "hidden states of no stage"
            hidden_TC = self._stage.end(begun.plan, begun.whole)
        self._keep_normed(begun.plan, begun.batch, hidden_TC)
        return hidden_TC

    @torch.inference_mode()
    def all_logits(self, plan: StepPlan) -> Tensor:
        """[T, V] float32: logits of every token of a step of text, as `run` computes them; for `firstlight quality`,
        which compares whole distributions."""
        batch = make_batch(plan, self._sequences.stripes.block_size)
        return self._model.logits(self._model.forward(batch, self._kv))

    def _keep_normed(self, plan: StepPlan, batch: Batch, hidden_TC: Tensor) -> None:
        """What the final norm makes of the step, for a draft model that goes on from it: of this rank's slots."""
        normed_SC = None if self._draft is None else self._draft.normed_SC
        if normed_SC is None:
            return
        assert self._final_norm is not None, "a draft model that needs the final norm, and there is none"
        if not plan.by_draft_model:
            own_TC = self._sequences.own_rows(hidden_TC, batch)
            normed_SC.index_copy_(0, batch.slots_T, self._final_norm(own_TC))
        elif plan.normed_slots:
            rows_R, slots_R = (torch.from_numpy(np.asarray(part)) for part in (plan.sample.rows, plan.normed_slots))
            stripes = self._sequences.stripes
            is_own_R = stripes.owners(slots_R) == stripes.rank
            own_slots = stripes.own_slots(slots_R[is_own_R]).long()
            normed_SC.index_copy_(0, own_slots, hidden_TC.index_select(0, rows_R[is_own_R]))

    def _image_rows(self, plan: StepPlan) -> "tuple[tuple[ImageRows, ...], array[int]]":
        if self._images is not None:
            return self._images.step(plan)
        if self._is_later_stage:
            return (), ints()
        assert not (plan.drop_slots or plan.encode.slots or plan.images.rows), "a plan with images, a model without"
        return (), ints()

    def _sample(self, model: LanguageModel, hidden_TC: Tensor, rows: SampleRows) -> "tuple[array[int], RowLogprobs]":
        if not rows.rows:
            return ints(), RowLogprobs()
        return self._ops.sample(_logits(model, hidden_TC, rows.rows), rows)

    def _pool(self, hidden_TC: Tensor, pool: PoolRows) -> "array[float]":
        if not pool.rows:
            return doubles()
        assert self._final_norm is not None, "a sequence to pool, and nothing to do it with"
        return pooled_sums(hidden_TC, pool, self._final_norm)

    def _score(self, hidden_TC: Tensor, rows: ScoreRows) -> RowLogprobs:
        chunks = _score_chunks(rows)
        return _concatenate([self._ops.score(_logits(self._model, hidden_TC, chunk.rows), chunk) for chunk in chunks])


def _score_chunks(rows: ScoreRows) -> Iterator[ScoreRows]:
    for start in range(0, len(rows.rows), SCORE_CHUNK):
        part = slice(start, start + SCORE_CHUNK)
        yield ScoreRows(rows=rows.rows[part], targets=rows.targets[part], top_logprobs=rows.top_logprobs[part])


def _logits(model: LanguageModel, hidden_TC: Tensor, rows: "array[int]") -> Tensor:
    """[R, V]"""
    where = torch.from_numpy(np.asarray(rows)).to(hidden_TC.device)
    return model.logits(hidden_TC.index_select(0, where))


def _concatenate(parts: list[RowLogprobs]) -> RowLogprobs:
    lengths = [length for part in parts for length in np.diff(np.asarray(part.top_offsets)).tolist()]
    return RowLogprobs(
        chosen=sum((part.chosen for part in parts), floats()),
        ranks=sum((part.ranks for part in parts), ints()),
        top_ids=sum((part.top_ids for part in parts), ints()),
        top_values=sum((part.top_values for part in parts), floats()),
        top_offsets=ints([0, *accumulate(lengths)]),
    )
