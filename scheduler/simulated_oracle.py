"""What each simulated sequence must say, worked out from its request alone. Used by `simulate.py` and tests."""

from math import isinf

from scheduler.fake_runtime import ROOT, choose, embedding, extend, logprob, rotated
from scheduler.request import FinishReason, Request, TokenEvent, TokenLogprob

EOS = 0
STOP_TOKEN = 1


def _expected_logprob(state: int, token: int, num_top: int) -> TokenLogprob:
    top = tuple((other, logprob(state, other)) for other in range(num_top))
    return TokenLogprob(value=logprob(state, token), top=top)


def _prompt_rows(request: Request) -> list[int]:
    """What each row of the prompt adds to the state."""
    rows, images = request.prompt_ids.tolist(), request.images
    for span in images.spans:
        for index in range(span.length):
            key = images.images[span.image].key
            rows[span.offset + index] = embedding(key, span.first + index, span.offset, span.end)
    if images.rope_positions:
        triples = zip(*[iter(images.rope_positions)] * 3, strict=True)
        rows = [rotated(row, position, rope) for position, (row, rope) in enumerate(zip(rows, triples, strict=True))]
    return rows


class Oracle:
    """Follows one request; `max_total` is the longest text that the server can hold."""

    def __init__(self, request: Request, max_total: int) -> None:
        self._request = request
        self._max_total = min(max_total, len(request.prompt_ids) + request.sampling.max_tokens)
        self.tokens = list(request.prompt_ids)
        self.outputs: list[int] = []
        self._finished = False
        self._state = ROOT
        self._prompt_scores: list[TokenLogprob] = []
        for index, (token, row) in enumerate(zip(self.tokens, _prompt_rows(request), strict=True)):
            if index and request.sampling.prompt_logprobs >= 0:
                scored = _expected_logprob(self._state, token, request.sampling.prompt_logprobs)
                self._prompt_scores.append(scored)
            self._state = extend(self._state, row)

    def check(self, event: TokenEvent) -> None:
        """Assert that the event is the next one that this request may have."""
        assert not self._finished, f"sequence {event.seq_id} goes on after its end"
        self._finished = event.finish_reason is not None
        if event.token_ids:
            self._check_token(event)
        else:
            assert event.finish_reason in (FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.ERROR), event
            assert bool(event.message) == (event.finish_reason is not FinishReason.ABORT), event

    def _check_token(self, event: TokenEvent) -> None:
        sampling = self._request.sampling
        token = choose(self._state, self._influences(), self._banned())
        assert event.token_ids == (token,), f"sequence {event.seq_id}: {event.token_ids} instead of {token}"
        expected = (_expected_logprob(self._state, token, sampling.logprobs),) if sampling.logprobs >= 0 else ()
        assert event.logprobs == expected, "wrong log-probabilities"
        assert event.prompt_logprobs == (() if self.outputs else tuple(self._prompt_scores)), "wrong prompt scores"
        most_cached = len(self._request.prompt_ids) - 1 if not self.outputs and sampling.prompt_logprobs < 0 else 0
        assert 0 <= event.cached_tokens <= most_cached, f"{event.cached_tokens} tokens cached"
        self.tokens.append(token)
        self.outputs.append(token)
        position = len(self.tokens) - 1
        rope = position + self._request.images.rope_delta
        self._state = extend(self._state, rotated(token, position, (rope, rope, rope)))
        assert (event.finish_reason, event.stop_token_id) == self._ending(token), "wrong end"

    def _ending(self, token: int) -> tuple[FinishReason | None, int | None]:
        if token in self._request.sampling.eos_token_ids:
            return FinishReason.STOP, None
        if token in self._request.sampling.stop_token_ids:
            return FinishReason.STOP, token
        return (FinishReason.LENGTH if len(self.tokens) == self._max_total else None), None

    def _influences(self) -> tuple[object, ...]:
        sampling = self._request.sampling
        penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        penalised = penalties != (0, 0, 1)
        return (
            sampling.seed,
            len(self.outputs),
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.min_p,
            *penalties,
            tuple(self.tokens) if penalised else (),
            len(self._request.prompt_ids) if penalised else 0,
            tuple(pair for pair in sampling.logit_bias if not isinf(pair[1])),
        )

    def _banned(self) -> set[int]:
        sampling = self._request.sampling
        early = len(self.outputs) < sampling.min_tokens
        banned = {*sampling.eos_token_ids, *sampling.stop_token_ids} if early else set()
        for word in sampling.bad_words:
            if [*self.outputs, word[-1]][-len(word) :] == list(word):
                banned.add(word[-1])
        return banned
