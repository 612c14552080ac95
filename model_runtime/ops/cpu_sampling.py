"""Choosing tokens on CPU in compiled code, float32 logits. Registered for 'cpu', called by the runner through `Ops`,
engine process. The buffers of a plan go to the kernel as they are; see `sampling` for what is done to a row.

Legend: N rows, V vocabulary.
"""

from array import array
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from model_runtime.kernels.library import library
from model_runtime.ops.registry import register
from scheduler.plan import NO_LOGPROBS, RowLogprobs, SampleRows, ScoreRows, floats, ints

Buffer: TypeAlias = "array[int] | array[float]"

MASK_BITS = 32
"""Tokens of a word of a mask."""


@register("sample", "cpu")
def sample(logits_NV: Tensor, rows: SampleRows) -> "tuple[array[int], RowLogprobs]":
    """Choose a token for each row."""
    logits_NV = logits_NV.contiguous()
    assert logits_NV.dtype == torch.float32, f"expected float32, got {logits_NV.dtype}"
    num_rows, vocab = logits_NV.shape
    token_ids = ints([0] * num_rows)
    columns: tuple[Buffer, ...] = (
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.counter,
        rows.presence_penalty,
        rows.frequency_penalty,
        rows.repetition_penalty,
        rows.history_ids,
        rows.history_offsets,
        rows.history_output_starts,
        rows.bias_ids,
        rows.bias_values,
        rows.bias_offsets,
        rows.mask_rows,
        rows.masks,
        token_ids,
    )
    num_masks = len(rows.mask_rows)
    assert len(rows.masks) == num_masks * -(-vocab // MASK_BITS), f"masks are not those of {vocab} tokens"
    failed = library().sample(logits_NV.data_ptr(), num_rows, vocab, num_masks, *map(_address, columns))
    assert not failed, f"a token id of a history or bias is outside 0 .. {vocab - 1}"
    return token_ids, _logprobs(logits_NV, token_ids, rows.top_logprobs)


@register("score", "cpu")
def score(logits_NV: Tensor, rows: ScoreRows) -> RowLogprobs:
    """Log-probabilities of `rows.targets`."""
    logits_NV = logits_NV.contiguous()
    assert logits_NV.dtype == torch.float32, f"expected float32, got {logits_NV.dtype}"
    return _logprobs(logits_NV, rows.targets, rows.top_logprobs)


def _address(buffer: Buffer) -> int:
    return buffer.buffer_info()[0]


def _logprobs(logits_NV: Tensor, token_ids: "array[int]", top_logprobs: "array[int]") -> RowLogprobs:
    """Of the tokens `token_ids`, and of the `top_logprobs` most likely ones, where that is not NO_LOGPROBS."""
    num_rows, vocab = logits_NV.shape
    offsets = ints([*accumulate((min(max(count, 0), vocab) for count in top_logprobs), initial=0)])
    chosen, ranks = floats([0.0] * num_rows), ints([0] * num_rows)
    top_ids, top_values = ints([0] * offsets[-1]), floats([0.0] * offsets[-1])
    if max(top_logprobs, default=NO_LOGPROBS) != NO_LOGPROBS:
        columns: tuple[Buffer, ...] = (token_ids, top_logprobs, offsets, chosen, ranks, top_ids, top_values)
        library().logprobs(logits_NV.data_ptr(), num_rows, vocab, *map(_address, columns))
    return RowLogprobs(chosen=chosen, ranks=ranks, top_ids=top_ids, top_values=top_values, top_offsets=offsets)
