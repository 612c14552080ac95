"""From a sequence's sampling parameters to the rows of a plan. Used by `plan_builder.py`, engine process."""

from math import inf

from scheduler.plan import SampleRows, ScoreRows
from scheduler.request import SamplingParams
from scheduler.sequence import Sequence


def banned_tokens(sampling: SamplingParams, outputs: "tuple[int, ...]", num_outputs: int) -> list[int]:
    """Tokens that may not come next: end tokens before min_tokens, and the last token of a bad word whose others are
    the newest outputs. `outputs` holds at least as many of the newest of the `num_outputs` output tokens as the
    longest bad word needs."""
    banned: list[int] = []
    if num_outputs < sampling.min_tokens:
        banned += sampling.eos_token_ids
        banned += sampling.stop_token_ids
    for word in sampling.bad_words:
        beginning = word[:-1]
        if not beginning or outputs[-len(beginning) :] == beginning:
            banned.append(word[-1])
    return banned


def _newest_outputs(seq: Sequence) -> "tuple[int, ...]":
    """As many of the newest outputs as the longest bad word has tokens before its last."""
    longest = max(map(len, seq.request.sampling.bad_words), default=1)
    return tuple(seq.tokens[max(seq.num_prompt, len(seq.tokens) - longest + 1) :])


def _add_bias(sample: SampleRows, seq: Sequence) -> None:
    sampling = seq.request.sampling
    for token, value in sampling.logit_bias:
        sample.bias_ids.append(token)
        sample.bias_values.append(value)
    if sampling.bad_words or seq.num_outputs < sampling.min_tokens:
        for token in banned_tokens(sampling, _newest_outputs(seq), seq.num_outputs):
            sample.bias_ids.append(token)
            sample.bias_values.append(-inf)
    sample.bias_offsets.append(len(sample.bias_ids))


def _add_history(sample: SampleRows, seq: Sequence) -> None:
    sampling = seq.request.sampling
    sample.presence_penalty.append(sampling.presence_penalty)
    sample.frequency_penalty.append(sampling.frequency_penalty)
    sample.repetition_penalty.append(sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1:
        sample.history_ids.extend(seq.tokens)
        sample.history_output_starts.append(seq.num_prompt)
    else:
        sample.history_output_starts.append(0)
    sample.history_offsets.append(len(sample.history_ids))


def add_sample_row(sample: SampleRows, seq: Sequence, row: int) -> None:
    """Append one row: the sequence's next token is sampled from the logits of the step's token `row`."""
    sampling = seq.request.sampling
    sample.rows.append(row)
    sample.temperature.append(sampling.temperature)
    sample.top_k.append(sampling.top_k)
    sample.top_p.append(sampling.top_p)
    sample.min_p.append(sampling.min_p)
    sample.seed.append(sampling.seed)
    sample.counter.append(seq.num_outputs)
    sample.top_logprobs.append(sampling.logprobs)
    _add_history(sample, seq)
    _add_bias(sample, seq)


def add_score_rows(score: ScoreRows, seq: Sequence, num_tokens: int, row: int) -> int:
    """Append the prompt rows among the sequence's next `num_tokens`, the first of which is the step's token `row`; the
    last prompt row has no next prompt token and is left out. Returns how many were appended."""
    first = seq.num_computed
    count = max(0, min(first + num_tokens, seq.num_prompt - 1) - first)
    score.rows.extend(range(row, row + count))
    score.targets.extend(seq.tokens[first + 1 : first + 1 + count])
    score.top_logprobs.extend([seq.request.sampling.prompt_logprobs] * count)
    return count
