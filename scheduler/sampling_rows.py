"""From sequences and their sampling parameters to the rows of a plan. Used by `plan_builder.py`, engine process.

Works column by column, since this is done for every sequence in every step: a list comprehension costs a fraction of
appending to a dozen buffers in turn.
"""

from array import array
from dataclasses import replace
from itertools import accumulate
from math import inf

from scheduler.masks import MaskRow, TokenMasks
from scheduler.plan import SampleRows, ScoreRows, floats, ints, uints
from scheduler.request import SamplingParams
from scheduler.sequence import Sequence

Bias = tuple[tuple[int, float], ...]
"""(token id, value added to its logit) of one row."""


def _banned_tokens(sampling: SamplingParams, outputs: "tuple[int, ...]", num_outputs: int) -> list[int]:
    """Tokens that may not come next: end tokens before min_tokens (a mask sees to that itself), and the last token of a
    bad word whose others are the newest outputs. `outputs` holds at least as many of the newest of the `num_outputs`
    output tokens as the longest bad word needs."""
    banned: list[int] = []
    if num_outputs < sampling.min_tokens and sampling.grammar is None:
        banned += sampling.eos_token_ids
        banned += sampling.stop_token_ids
    for word in sampling.bad_words:
        beginning = word[:-1]
        if not beginning or outputs[-len(beginning) :] == beginning:
            banned.append(word[-1])
    return banned


def _newest_outputs(seq: Sequence, drafts: "array[int]") -> "tuple[int, ...]":
    """As many of the newest outputs as the longest bad word has tokens before its last."""
    longest = max(map(len, seq.request.sampling.bad_words), default=1)
    newest = (*seq.tokens[max(seq.num_prompt, len(seq.tokens) - longest + 1) :], *drafts)
    return newest[max(0, len(newest) - longest + 1) :]


def _bias(seq: Sequence, drafts: "array[int]") -> Bias:
    sampling, num_outputs = seq.request.sampling, seq.num_outputs + len(drafts)
    if not sampling.bad_words and num_outputs >= sampling.min_tokens:
        return sampling.logit_bias
    banned = _banned_tokens(sampling, _newest_outputs(seq, drafts), num_outputs)
    return (*sampling.logit_bias, *((token, -inf) for token in banned))


def _has_penalty(sampling: SamplingParams) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1)


def _has_bias(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias or sampling.bad_words or sampling.min_tokens)


def _fixed_columns(params: list[SamplingParams]) -> SampleRows:
    """What depends on parameters alone; no histories and biases."""
    return SampleRows(
        temperature=floats([sampling.temperature for sampling in params]),
        top_k=ints([sampling.top_k for sampling in params]),
        top_p=floats([sampling.top_p for sampling in params]),
        min_p=floats([sampling.min_p for sampling in params]),
        seed=uints([sampling.seed for sampling in params]),
        presence_penalty=floats([sampling.presence_penalty for sampling in params]),
        frequency_penalty=floats([sampling.frequency_penalty for sampling in params]),
        repetition_penalty=floats([sampling.repetition_penalty for sampling in params]),
        history_offsets=ints([0] * (len(params) + 1)),
        history_output_starts=ints([0] * len(params)),
        bias_offsets=ints([0] * (len(params) + 1)),
        top_logprobs=ints([sampling.logprobs for sampling in params]),
    )


class SampledRows:
    """Makes the `SampleRows` of step after step. What follows from parameters is kept from the step before, in which
    mostly the same sequences were sampled; the sequences, which hold their images' pixels, are not."""

    def __init__(self, masks: TokenMasks | None) -> None:
        """`masks` is needed by sequences with a grammar."""
        self._masks = masks
        self._params: list[SamplingParams] = []
        self._fixed = SampleRows()
        self._have_penalties = self._have_biases = self._have_grammars = False

    def of_step(self, seqs: list[Sequence], drafts: "list[array[int]]", rows: "array[int]") -> SampleRows:
        """Row r samples what follows the tokens of seqs[r] and drafts[r], from the logits of the step's token rows[r],
        int32 [R]: a sequence with drafts has a row for each of them, which is sampled as if they were output."""
        params = [seq.request.sampling for seq in seqs]
        if params != self._params:
            self._params, self._fixed = params, _fixed_columns(params)
            self._have_penalties = any(map(_has_penalty, params))
            self._have_biases = any(map(_has_bias, params))
            self._have_grammars = any(sampling.grammar is not None for sampling in params)
        counter = [len(seq.tokens) + len(before) - seq.num_prompt for seq, before in zip(seqs, drafts, strict=True)]
        sample = replace(self._fixed, rows=rows, counter=uints(counter))
        if self._have_penalties:
            sample = _with_histories(sample, seqs, drafts)
        if self._have_biases:
            sample = _with_biases(sample, seqs, drafts)
        if self._have_grammars:
            assert self._masks is not None, "a grammar, and nobody who knows it"
            sample = _with_masks(sample, seqs, drafts, self._masks)
        return sample


def _with_histories(sample: SampleRows, seqs: list[Sequence], drafts: "list[array[int]]") -> SampleRows:
    history_ids, lengths, starts = ints(), [], []
    for seq, before in zip(seqs, drafts, strict=True):
        penalised = _has_penalty(seq.request.sampling)
        if penalised:
            history_ids.extend(seq.tokens)
            history_ids.extend(before)
        lengths.append(len(seq.tokens) + len(before) if penalised else 0)
        starts.append(seq.num_prompt if penalised else 0)
    return replace(
        sample,
        history_ids=history_ids,
        history_offsets=ints([*accumulate(lengths, initial=0)]),
        history_output_starts=ints(starts),
    )


def _with_biases(sample: SampleRows, seqs: list[Sequence], drafts: "list[array[int]]") -> SampleRows:
    biases = [_bias(seq, before) for seq, before in zip(seqs, drafts, strict=True)]
    return replace(
        sample,
        bias_ids=ints([token for bias in biases for token, _ in bias]),
        bias_values=floats([value for bias in biases for _, value in bias]),
        bias_offsets=ints([*accumulate(map(len, biases), initial=0)]),
    )


def _with_masks(sample: SampleRows, seqs: list[Sequence], drafts: "list[array[int]]", masks: TokenMasks) -> SampleRows:
    mask_rows = [row for row, seq in enumerate(seqs) if seq.request.sampling.grammar is not None]
    asked = [
        MaskRow(seqs[row].request.seq_id, seqs[row].tokens, seqs[row].num_prompt, drafts[row]) for row in mask_rows
    ]
    words = masks.next_tokens(asked)
    size = len(words) * words.itemsize // len(asked)  # bytes a row
    for index, row in enumerate(mask_rows):
        sampling = seqs[row].request.sampling
        if seqs[row].num_outputs + len(drafts[row]) < sampling.min_tokens:
            _take_end_tokens(memoryview(words).cast("B")[index * size :][:size], sampling)
    return replace(sample, mask_rows=ints(mask_rows), masks=words)


def _take_end_tokens(mask: memoryview, sampling: SamplingParams) -> None:
    """Out of a row's mask, unless the output has to end."""
    allowed = bytes(mask)
    for token in (*sampling.eos_token_ids, *sampling.stop_token_ids):
        mask[token // 8] &= ~(1 << token % 8)
    if not any(mask):
        mask[:] = allowed


def add_score_rows(score: ScoreRows, seq: Sequence, num_tokens: int, row: int) -> int:
    """Append the prompt rows among the sequence's next `num_tokens`, the first of which is the step's token `row`; the
    last prompt row has no next prompt token and is left out. Returns how many were appended."""
    first = seq.num_computed
    count = max(0, min(first + num_tokens, seq.num_prompt - 1) - first)
    score.rows.extend(range(row, row + count))
    score.targets.extend(seq.tokens[first + 1 : first + 1 + count])
    score.top_logprobs.extend([seq.request.sampling.prompt_logprobs] * count)
    return count
