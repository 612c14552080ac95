"""Logits to tokens and log-probabilities, all rows of a step at once: the operations `sample` and `score` in plain
torch, for any device. They define the meaning; `ops.cpu_sampling` has the same on CPU in compiled code. Called by the
runner on rank 0, engine process.

What happens to a row, in this order:

1. Log-probabilities, where asked for, are taken from the logits as the model gave them.
2. Tokens that the row's mask does not name get -inf; then `bias_values` are added; -inf bans a token.
3. Penalties. For each token in the row's history, once: logit / repetition_penalty where the logit is positive, else
   logit * repetition_penalty (CTRL, arXiv 1909.05858); then minus frequency_penalty * n, minus presence_penalty where
   n > 0, with n the times the token stands in the output part of the history.
4. temperature 0: the first maximum is the token, and the row is done. Else a token's weight is
   w = exp((logit - largest logit) / temperature); its probability is its share of the sum.
5. top_k: the k most likely tokens stay; among equals the lower id.
6. top_p: of these, the smallest number of most likely tokens stays whose w is top_p of all their w or more, at least
   one; among equals the lower id.
7. min_p: tokens with w >= min_p stay; the largest w is 1. (5 to 7 compose as in Hugging Face's generate.)
8. One uniform number u in [0, 1), a function of (seed, counter), picks from what stayed, in the order of ids: the first
   token at which the cumulative w exceeds u * (sum of w).

A row's result is the same bit for bit in any batch, at any number of threads: every operation here works on one row
in an order of its own, or is exact. To that end w is rounded to a multiple of 2^-40 and held as an integer; sums of
integers are exact in any order. A token that is 2^41 times less likely than the likeliest is never drawn.

A row with a NaN or +inf, or with no token left to choose, yields FAILED_TOKEN and disturbs no other row.

Legend: R rows to sample, M of these with a mask, V vocabulary, W words of a mask, N rows with temperature > 0, F rows
with top_k or top_p, C candidates, H tokens of history.
"""

from array import array

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runtime.ops.registry import register
from model_runtime.random import uniform
from model_runtime.ranking import ranked
from scheduler.plan import FAILED_TOKEN, LOGPROB_FLOOR, NO_LOGPROBS, RowLogprobs, SampleRows, ScoreRows, floats, ints

WEIGHT_ONE = 2.0**40
"""The fixed-point weight of the most likely token."""

CANDIDATES = (256, 4096)
"""How many most likely tokens top_k and top_p look at, before they look at all. Changes the time, never the result."""


@register("sample", "any")
def sample(logits_RV: Tensor, rows: SampleRows) -> "tuple[array[int], RowLogprobs]":
    """Choose a token for each row: logits float32 [R, V] -> (int32 [R] or FAILED_TOKEN, log-probabilities)."""
    adjusted_RV = _penalise(_add_bias(_mask(logits_RV, rows), rows), rows)
    failed_R = ~torch.isfinite(adjusted_RV.amax(dim=1))  # a NaN or +inf is the maximum; -inf only of nothing else
    if failed_R.any():
        adjusted_RV = adjusted_RV.masked_fill(failed_R[:, None], 0.0)
    ids_R = _choose(adjusted_RV, rows).masked_fill(failed_R, FAILED_TOKEN)
    return ints(ids_R.tolist()), _logprobs(logits_RV, ids_R, np.asarray(rows.top_logprobs))


@register("score", "any")
def score(logits_PV: Tensor, rows: ScoreRows) -> RowLogprobs:
    """Log-probabilities of given tokens (`rows.targets`): logits float32 [P, V]. `rows.rows` is not read."""
    return _logprobs(logits_PV, _tensor(rows.targets, logits_PV).long(), np.asarray(rows.top_logprobs))


def _tensor(buffer: "array[int] | array[float]", like: Tensor, chosen: NDArray[np.intp] | None = None) -> Tensor:
    """A plan's buffer, or some entries of it, on the device of `like`."""
    values = np.asarray(buffer)
    return torch.from_numpy(values if chosen is None else values[chosen]).to(like.device)


def _row_of(offsets: "array[int]") -> NDArray[np.intp]:
    """The row that each entry of a ragged list belongs to."""
    lengths = np.diff(np.asarray(offsets))
    return np.repeat(np.arange(len(lengths)), lengths)


def _mask(logits_RV: Tensor, rows: SampleRows) -> Tensor:
    if not rows.mask_rows:
        return logits_RV
    words_MW = np.asarray(rows.masks).reshape(len(rows.mask_rows), -1)
    allowed_MV = np.unpackbits(words_MW.view(np.uint8), axis=1, count=logits_RV.shape[1], bitorder="little")
    banned_MV = torch.from_numpy(allowed_MV == 0).to(logits_RV.device)
    where = _tensor(rows.mask_rows, logits_RV).long()
    return logits_RV.index_copy(0, where, logits_RV[where].masked_fill(banned_MV, -torch.inf))


def _add_bias(logits_RV: Tensor, rows: SampleRows) -> Tensor:
    if not rows.bias_ids:
        return logits_RV
    where = (
        torch.from_numpy(_row_of(rows.bias_offsets)).to(logits_RV.device),
        _tensor(rows.bias_ids, logits_RV).long(),
    )
    return logits_RV.index_put(where, _tensor(rows.bias_values, logits_RV), accumulate=True)


def _penalise(logits_RV: Tensor, rows: SampleRows) -> Tensor:
    if not rows.history_ids:
        return logits_RV
    row_H = _row_of(rows.history_offsets)
    starts_R = np.asarray(rows.history_offsets)[:-1] + np.asarray(rows.history_output_starts)
    is_output_H = np.arange(len(row_H)) >= starts_R[row_H]
    vocab = logits_RV.shape[1]
    distinct, group_H = np.unique(row_H * vocab + np.asarray(rows.history_ids), return_inverse=True)
    row, token = np.divmod(distinct, vocab)
    times = torch.from_numpy(np.bincount(group_H, weights=is_output_H).astype(np.float32)).to(logits_RV.device)
    where = (torch.from_numpy(row).to(logits_RV.device), torch.from_numpy(token).to(logits_RV.device))
    logits = logits_RV[where]
    repetition = _tensor(rows.repetition_penalty, logits, row)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - _tensor(rows.frequency_penalty, logits, row) * times
    logits = logits - _tensor(rows.presence_penalty, logits, row) * (times > 0)
    return logits_RV.index_put(where, logits)


def _choose(logits_RV: Tensor, rows: SampleRows) -> Tensor:
    """Token ids int64 [R] from finite rows."""
    drawn = np.flatnonzero(np.asarray(rows.temperature) > 0)
    if len(drawn) == 0:
        return logits_RV.argmax(dim=1)
    if len(drawn) == len(logits_RV):
        return _draw(logits_RV, rows, drawn)
    where = torch.from_numpy(drawn).to(logits_RV.device)
    return logits_RV.argmax(dim=1).index_put((where,), _draw(logits_RV.index_select(0, where), rows, drawn))


def _draw(logits_NV: Tensor, rows: SampleRows, drawn: NDArray[np.intp]) -> Tensor:
    """Token ids int64 [N]; entry n belongs to row drawn[n] of `rows`."""
    temperature_N1 = _tensor(rows.temperature, logits_NV, drawn)[:, None]
    p_NV = ((logits_NV - logits_NV.amax(dim=1, keepdim=True)) / temperature_N1).exp()
    weights_NV = (p_NV * WEIGHT_ONE).round().long()
    top_k_N1 = _tensor(rows.top_k, logits_NV, drawn)[:, None].long()
    top_p_N1 = _tensor(rows.top_p, logits_NV, drawn)[:, None].double()
    filtered = torch.nonzero((top_k_N1 > 0) | (top_p_N1 < 1))[:, 0]
    if len(filtered):
        _filter(filtered, logits_NV, weights_NV, top_k_N1, top_p_N1)
    min_p_N1 = _tensor(rows.min_p, logits_NV, drawn)[:, None]
    if min_p_N1.any():
        weights_NV.masked_fill_(p_NV < min_p_N1, 0)
    cumulative_NV = weights_NV.cumsum(dim=1)
    u_N = uniform(np.asarray(rows.seed)[drawn], np.asarray(rows.counter)[drawn])
    target_N1 = torch.floor(torch.from_numpy(u_N).to(logits_NV.device)[:, None] * cumulative_NV[:, -1:]).long()
    return torch.searchsorted(cumulative_NV, target_N1, right=True)[:, 0]


def _filter(todo: Tensor, logits_NV: Tensor, weights_NV: Tensor, top_k_N1: Tensor, top_p_N1: Tensor) -> None:
    """Set to 0, in place, the weights that top_k and then top_p drop from the rows `todo`. Tokens are ranked by logit,
    which temperature cannot tie. Looks at ever more candidates until a row's last kept token is among them."""
    vocab = logits_NV.shape[1]
    top_k_N1 = torch.where(top_k_N1 > 0, top_k_N1.clamp(max=vocab), vocab)
    for width in (*CANDIDATES, vocab):
        _, ids_FC = ranked(logits_NV.index_select(0, todo), width)
        kept_FC, done_F = _keep(weights_NV, todo, ids_FC, top_k_N1[todo], top_p_N1[todo])
        done = todo[done_F]
        weights_NV.index_fill_(0, done, 0)
        weights_NV[done[:, None], ids_FC[done_F]] = kept_FC[done_F]
        todo = todo[~done_F]
        if len(todo) == 0:
            return


def _keep(
    weights_NV: Tensor, todo: Tensor, ids_FC: Tensor, top_k_F1: Tensor, top_p_F1: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the candidates ids_FC, most likely first: (their weights, 0 where dropped; done_F: no other can be kept)."""
    vocab, candidates = weights_NV.shape[1], ids_FC.shape[1]
    weights_FC = weights_NV[todo[:, None], ids_FC]
    cumulative_FC = weights_FC.cumsum(dim=1)
    mass_of_k_F1 = cumulative_FC.gather(1, top_k_F1.clamp(max=candidates) - 1)
    mass_F1 = torch.where(top_k_F1 < vocab, mass_of_k_F1, weights_NV.sum(dim=1)[todo, None])
    rank_C = torch.arange(candidates, device=ids_FC.device)
    kept_FC = (cumulative_FC - weights_FC < top_p_F1 * mass_F1) & (rank_C < top_k_F1)
    kept_FC[:, 0] = True
    done_F1 = (top_k_F1 <= candidates) | ((top_k_F1 == vocab) & ~kept_FC[:, -1:])
    return weights_FC * kept_FC, done_F1[:, 0]


def _logprobs(logits_RV: Tensor, ids_R: Tensor, top_R: NDArray[np.int32]) -> RowLogprobs:
    """Of the tokens ids_R (FAILED_TOKEN gets the floor) and of the top_R most likely ones, where top_R says so."""
    asked = np.flatnonzero(top_R != NO_LOGPROBS)
    counts_R = top_R.clip(0, logits_RV.shape[1])
    chosen_R, ranks_R = np.zeros(len(top_R), dtype=np.float32), np.zeros(len(top_R), dtype=np.int32)
    offsets = ints([0, *np.cumsum(counts_R).tolist()])
    if len(asked) == 0:
        return RowLogprobs(chosen=floats(chosen_R.tolist()), ranks=ints(ranks_R.tolist()), top_offsets=offsets)
    where = torch.from_numpy(asked).to(logits_RV.device)
    logits_AV, ids_A1 = logits_RV[where], ids_R[where][:, None]
    logprobs_AV = logits_AV.log_softmax(dim=1)
    chosen_A = _finite(logprobs_AV.gather(1, ids_A1.clamp(min=0))).masked_fill(ids_A1 < 0, LOGPROB_FLOOR)[:, 0]
    chosen_R[asked] = chosen_A.cpu().numpy()
    ranks_R[asked] = _ranks(logits_AV, ids_A1).cpu().numpy()
    _, top_ids_AC = ranked(logits_AV, max(1, int(counts_R.max())))
    values_AC = logprobs_AV.gather(1, top_ids_AC)
    wanted_AC = torch.arange(values_AC.shape[1]) < torch.from_numpy(counts_R[asked])[:, None]
    return RowLogprobs(
        chosen=floats(chosen_R.tolist()),
        ranks=ints(ranks_R.tolist()),
        top_ids=ints(top_ids_AC.cpu()[wanted_AC].tolist()),
        top_values=floats(_finite(values_AC).cpu()[wanted_AC].tolist()),
        top_offsets=offsets,
    )


def _ranks(logits_AV: Tensor, ids_A1: Tensor) -> Tensor:
    """[A]: the place of each token in its row, most likely first, ties by lower id; 0 where logits are not finite."""
    chosen_A1 = logits_AV.gather(1, ids_A1.clamp(min=0))
    before_AV = torch.arange(logits_AV.shape[1], device=logits_AV.device) <= ids_A1
    ranks_A = ((logits_AV > chosen_A1) | ((logits_AV == chosen_A1) & before_AV)).sum(dim=1)
    return ranks_A.masked_fill(~torch.isfinite(logits_AV.amax(dim=1)) | (ids_A1[:, 0] < 0), 0)


def _finite(logprobs: Tensor) -> Tensor:
    return logprobs.nan_to_num(nan=LOGPROB_FLOOR, neginf=LOGPROB_FLOOR).clamp(min=LOGPROB_FLOOR)
