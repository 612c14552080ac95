"""The text of one choice: what each token event adds to it, and how it ends.

Part of step 9 of a request's path. Made and fed by `server/stream.py`; API process. Pure.
"""

from collections import deque
from dataclasses import dataclass, replace

from server.detokenize import TextDecoder
from server.generation import GenerationRequest
from server.output import PLAIN, OutputForm, OutputReader
from server.prompt.tokenizer import Tokenizer
from server.tools.calls import AnswerPart, CallPart
from server.wire import Event, Logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class TextToken:
    """A token with its log-probability. `data` are its bytes in the text (cut where a stop string cut the text)."""

    token_id: int
    data: bytes
    value: float | None
    """None for the first token of a prompt, which nothing predicts."""
    top_ids: tuple[int, ...] = ()
    top_values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one choice."""

    index: int
    """prompt * n + choice"""
    reasoning: str = ""
    """It comes before the answer."""
    answer: tuple[AnswerPart, ...] = ()
    token_ids: tuple[int, ...] = ()
    """All tokens since the choice's last delta with text, tokens or an end; end tokens included."""
    tokens: tuple[TextToken, ...] = ()
    """Of all that the model wrote, reasoning and calls too, when log-probabilities were asked for."""
    finish_reason: str | None = None
    """stop, length or tool_calls (every call is complete), on the choice's last delta."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the choice."""

    @property
    def text(self) -> str:
        """Content alone."""
        return "".join(part for part in self.answer if isinstance(part, str))

    @property
    def calls(self) -> tuple[CallPart, ...]:
        """Pieces of calls alone."""
        return tuple(part for part in self.answer if not isinstance(part, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of an API request, as the renderer needs it."""

    request: GenerationRequest
    echo: str | None = None
    """The text that precedes each choice's output."""
    discard_output: bool = False
    """max_tokens was 0: the engine computes one token, which is dropped and not counted."""
    form: OutputForm = PLAIN


class ChoiceText:
    """The text of one choice, grown event by event."""

    def __init__(self, index: int, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self.index, self._prompt, self._tokenizer = index, prompt, tokenizer
        request = prompt.request
        self._decoder = TextDecoder()
        self._reader = OutputReader(prompt.form, request.stop, request.include_stop)
        self._min_tokens = request.sampling.min_tokens
        self._want_tokens = request.sampling.logprobs >= 0
        self._pending: deque[TextToken] = deque()
        self._ahead = 0
        self._unsent_ids: list[int] = []
        self._started = False
        self.ended = False
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.cached_tokens = 0
        self.draft_tokens = self.accepted_tokens = 0

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self._prompt.request.prompt_ids.tolist()

    def push(self, event: Event, prompt_logprobs: list[Logprob]) -> Delta | None:
        """What the event adds; None while nothing of it may be shown. `prompt_logprobs` are used by the first event."""
        if not event.token_ids and event.finish_reason is None:
            return None
        first, self._started = not self._started, True
        if event.token_ids and first:
            self.cached_tokens = event.cached_tokens
        if not self._prompt.discard_output:
            self._take_tokens(event)
        finish_reason = self._end(event)
        self.ended = finish_reason is not None
        parts = self._reader.take()
        reasoning, answer = parts.reasoning, tuple(parts.answer)
        tokens = self._release(parts.text_bytes - self._decoder.take_surplus()) if self._want_tokens else []
        if first and self._prompt.echo is not None:
            answer = (self._prompt.echo, *answer)
            tokens = self._echoed(prompt_logprobs) + tokens
        has_more = bool(reasoning or answer or tokens or self.ended)
        if not (first or has_more):
            return None
        token_ids: tuple[int, ...] = ()
        if has_more:
            token_ids, self._unsent_ids = tuple(self._unsent_ids), []
        return Delta(
            index=self.index,
            reasoning=reasoning,
            answer=answer,
            token_ids=token_ids,
            tokens=tuple(tokens),
            finish_reason=finish_reason,
            stop_reason=(self._reader.stopped or event.stop_token_id)
            if finish_reason in ("stop", "tool_calls")
            else None,
        )

    def _end(self, event: Event) -> str | None:
        """Why the choice ends with this event; None when it goes on."""
        if event.finish_reason is None and not self._reader.is_over:
            return None
        self._reader.finish()
        if self._prompt.discard_output:
            return "length"
        reason = "stop" if self._reader.is_over else event.finish_reason
        return "tool_calls" if reason == "stop" and self._reader.has_calls else reason

    def _take_tokens(self, event: Event) -> None:
        """Read the tokens up to and including the one with which the output is over."""
        last = len(event.token_ids) - 1
        self.draft_tokens += event.num_drafts
        for position, token_id in enumerate(event.token_ids):
            self.completion_tokens += 1
            self.accepted_tokens += position < last
            self.reasoning_tokens += self._reader.reasoning
            self._unsent_ids.append(token_id)
            if self._is_hidden(token_id) or (position == last and self._is_hidden_end(event)):
                continue
            self._push(token_id)
            if self._want_tokens:
                self._pending.append(self._text_token(token_id, event.logprobs[position]))
            if self._reader.is_over:
                break

    def _push(self, token_id: int) -> None:
        """A stop string counts once there are more than min_tokens tokens, as end tokens do in the engine."""
        text = self._decoder.push(self._tokenizer.token_bytes(token_id))
        self._reader.push(text, may_stop=self.completion_tokens > self._min_tokens)

    def _is_hidden(self, token_id: int) -> bool:
        """Special tokens are no text, but for marks."""
        return self._tokenizer.is_special(token_id) and token_id not in self._prompt.form.markup_ids

    def _is_hidden_end(self, event: Event) -> bool:
        """The token that ended the choice is no text, unless it is a stop token and the client wants to see it."""
        if event.finish_reason != "stop":
            return False
        return event.stop_token_id is None or not self._prompt.request.include_stop

    def _text_token(self, token_id: int, logprob: Logprob) -> TextToken:
        wanted = self._prompt.request.sampling.logprobs  # of a prompt's tokens, more may have been asked for
        return TextToken(
            token_id=token_id,
            data=self._tokenizer.token_bytes(token_id),
            value=logprob.value,
            top_ids=tuple(logprob.top_ids[:wanted]),
            top_values=tuple(logprob.top_values[:wanted]),
        )

    def _release(self, text_bytes: int) -> list[TextToken]:
        """The pending tokens whose bytes are in the text shown so far. At the end all are, except what a stop string
        cut off; the token that it cut through keeps the bytes before the cut."""
        self._ahead += text_bytes
        released = []
        while self._pending and (
            len(self._pending[0].data) <= self._ahead or (self.ended and not self._reader.stopped)
        ):
            token = self._pending.popleft()
            self._ahead -= len(token.data)
            released.append(token)
        if self.ended and self._pending and self._ahead > 0:
            cut = self._pending[0]
            released.append(replace(cut, data=cut.data[: self._ahead]))
        return released

    def _echoed(self, logprobs: list[Logprob]) -> list[TextToken]:
        if not self._want_tokens:
            return []
        ids = self._prompt.request.prompt_ids
        first = TextToken(token_id=ids[0], data=self._tokenizer.token_bytes(ids[0]), value=None)
        return [first, *(self._text_token(token, value) for token, value in zip(ids[1:], logprobs, strict=True))]
