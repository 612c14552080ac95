"""From a step's result to what a sequence's owner is told. Pure functions used by `Scheduler`, engine process."""

from scheduler.plan import RowLogprobs
from scheduler.request import FinishReason, TokenEvent, TokenLogprob
from scheduler.sequence import Sequence


def logprob_at(rows: RowLogprobs, row: int) -> TokenLogprob:
    """Log-probability of one row with its alternatives."""
    start, end = rows.top_offsets[row], rows.top_offsets[row + 1]
    top = tuple(zip(rows.top_ids[start:end], rows.top_values[start:end], strict=True))
    return TokenLogprob(value=rows.chosen[row], top=top)


def ending(seq: Sequence) -> tuple[FinishReason | None, int | None]:
    """Whether the newest token ends the sequence: (reason, member of stop_token_ids that did it)."""
    sampling, token = seq.request.sampling, seq.tokens[-1]
    if token in sampling.eos_token_ids:
        return FinishReason.STOP, None
    if token in sampling.stop_token_ids:
        return FinishReason.STOP, token
    return (FinishReason.LENGTH if len(seq.tokens) >= seq.max_total else None), None


def token_event(seq: Sequence, sampled: RowLogprobs, row: int) -> TokenEvent:
    """The event of the newest token, which was sampled by `row`; the first one also tells about the prompt."""
    request = seq.request
    first = seq.num_outputs == 1
    reason, stop_token = ending(seq)
    if reason is None and not first and request.sampling.logprobs < 0:
        return TokenEvent(request.seq_id, (seq.tokens[-1],))  # nearly always, and in half the time
    return TokenEvent(
        seq_id=request.seq_id,
        token_ids=(seq.tokens[-1],),
        logprobs=(logprob_at(sampled, row),) if request.sampling.logprobs >= 0 else (),
        prompt_logprobs=tuple(seq.prompt_scores) if first else (),
        cached_tokens=(seq.prefix_hit or 0) if first else 0,
        finish_reason=reason,
        stop_token_id=stop_token,
    )
