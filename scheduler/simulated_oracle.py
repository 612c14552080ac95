"""What each simulated sequence must say, worked out from its request alone. Used by `simulate.py` and tests."""

from collections.abc import Callable
from math import isinf
from random import Random

from scheduler.fake_runtime import ROOT, VOCAB, choose, embedding, extend, logprob, pooled, rotated
from scheduler.plan import doubles, ints
from scheduler.request import FinishReason, Request, TokenEvent, TokenLogprob
from scheduler.sequence import Sequence
from scheduler.speculation import Proposal

EOS = 0
STOP_TOKEN = 1


def _expected_logprob(state: int, token: int, num_top: int) -> TokenLogprob:
    top = tuple((other, logprob(state, other)) for other in range(num_top))
    return TokenLogprob(value=logprob(state, token), top=top, rank=token + 1)


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
        states: list[int] = []
        for index, (token, row) in enumerate(zip(self.tokens, _prompt_rows(request), strict=True)):
            if index and request.sampling.prompt_logprobs >= 0:
                scored = _expected_logprob(self._state, token, request.sampling.prompt_logprobs)
                self._prompt_scores.append(scored)
            self._state = extend(self._state, row)
            states.append(self._state)
        counted = states if request.pooling == "mean" else states[-1:]
        self._pooled = doubles([*map(sum, zip(*map(pooled, counted), strict=True))]).tobytes()

    def check(self, event: TokenEvent) -> None:
        """Assert that the event is the next one that this request may have."""
        assert not self._finished, f"sequence {event.seq_id} goes on after its end"
        self._finished = event.finish_reason is not None
        if event.pooled:
            self._check_pooled(event)
        elif event.token_ids:
            assert self._request.pooling is None, "a token of a sequence that is pooled"
            self._check_tokens(event)
        else:
            assert event.finish_reason in (FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.ERROR), event
            assert bool(event.message) == (event.finish_reason is not FinishReason.ABORT), event

    def _check_pooled(self, event: TokenEvent) -> None:
        assert (event.pooled, event.finish_reason) == (self._pooled, FinishReason.STOP), "wrong sum"
        most_cached = len(self._request.prompt_ids) - 1 if self._request.pooling == "last" else 0
        assert 0 <= event.cached_tokens <= most_cached, f"{event.cached_tokens} tokens cached"

    def peek(self, count: int) -> list[int]:
        """The next `count` tokens, or fewer if the text ends before; nothing changes."""
        kept = self._state, len(self.tokens), len(self.outputs)
        peeked: list[int] = []
        while len(peeked) < count and (not peeked or self._ending(peeked[-1]) == (None, None)):
            peeked.append(self._next())
            self._append(peeked[-1])
        self._state = kept[0]
        del self.tokens[kept[1] :], self.outputs[kept[2] :]
        return peeked

    def _next(self) -> int:
        return choose(self._state, self._influences(), self._banned())

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self.outputs.append(token)
        position = len(self.tokens) - 1
        rope = position + self._request.images.rope_delta
        self._state = extend(self._state, rotated(token, position, (rope, rope, rope)))

    def _check_tokens(self, event: TokenEvent) -> None:
        sampling = self._request.sampling
        assert len(event.token_ids) <= event.num_drafts + 1, "more tokens than rows"
        assert event.prompt_logprobs == (() if self.outputs else tuple(self._prompt_scores)), "wrong prompt scores"
        most_cached = len(self._request.prompt_ids) - 1 if not self.outputs and sampling.prompt_logprobs < 0 else 0
        assert 0 <= event.cached_tokens <= most_cached, f"{event.cached_tokens} tokens cached"
        assert len(event.logprobs) == (len(event.token_ids) if sampling.logprobs >= 0 else 0), "wrong logprobs"
        last = len(event.token_ids) - 1
        for index, token in enumerate(event.token_ids):
            expected = self._next()
            assert token == expected, f"sequence {event.seq_id}: {event.token_ids}, of which {token} is not {expected}"
            if event.logprobs:
                logprob = _expected_logprob(self._state, token, sampling.logprobs)
                assert event.logprobs[index] == logprob, "wrong log-probabilities"
            self._append(token)
            end = (event.finish_reason, event.stop_token_id) if index == last else (None, None)
            assert end == self._ending(token), "wrong end"

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


class Clairvoyant:
    """A drafter that knows how every text goes on, and lies at times. `oracle_of` takes a sequence's id."""

    def __init__(self, random: Random, oracle_of: Callable[[int], Oracle]) -> None:
        self._random, self._oracle_of = random, oracle_of

    def propose(self, seq: Sequence) -> Proposal:
        """Up to six tokens, the last ones sometimes wrong or behind the end."""
        random = self._random
        tokens = self._oracle_of(seq.request.seq_id).peek(random.randrange(6))
        tokens = tokens[: random.choice((0, 1, 3, 6))] + random.choices(range(VOCAB), k=random.randrange(3))
        return Proposal(ints(tokens), random.choice((1.0, 1.0, 0.5)))

    def finish(self, seq: Sequence) -> None:
        """Nothing is kept."""
