"""The engine's events of one API request, merged and turned into deltas of text; cancels in the end what is unfinished.

Step 9 of a request's path. Made by `server/api/submit.py`, read by the renderers in `server/api`; API process.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

from server.choice import ChoiceText, Delta, Prompt
from server.errors import BadRequest, DeadlineExceeded, InternalError, Overloaded, from_engine
from server.generation import RequestStream
from server.metrics import RequestMeter
from server.prompt.tokenizer import Tokenizer
from server.wire import Event, Logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of an API request: prompts counted once each, completions over all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    image_tokens: int = 0
    """Those of prompt_tokens that stand for images."""
    reasoning_tokens: int = 0
    """Those of completion_tokens before the end of the reasoning."""
    draft_tokens: int = 0
    """Drafts that were computed; `accepted_tokens` of them are among completion_tokens."""
    accepted_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class _PromptState:
    prompt: Prompt
    stream: RequestStream
    choices: list[ChoiceText]
    logprobs: list[Logprob] = field(default_factory=list)
    """Of the prompt's tokens, from whichever choice brought them."""


class Generation:
    """All prompts and choices of one API request. Must be closed, which `deltas` does when it ends, however it ends."""

    def __init__(
        self, prompts: list[Prompt], streams: list[RequestStream], tokenizer: Tokenizer, meter: RequestMeter
    ) -> None:
        self._meter = meter
        self._states: list[_PromptState] = []
        index = 0
        for prompt, stream in zip(prompts, streams, strict=True):
            n = prompt.request.n
            choices = [ChoiceText(index + choice, prompt, tokenizer) for choice in range(n)]
            self._states.append(_PromptState(prompt=prompt, stream=stream, choices=choices))
            index += n
        self._prompt_tokens = sum(len(prompt.request.prompt_ids) for prompt in prompts)
        self._image_tokens = sum(span.length for prompt in prompts for span in prompt.request.images.spans)

    @property
    def num_choices(self) -> int:
        """Of all prompts together."""
        return len(self._choices())

    def prompt_ids(self, index: int) -> list[int]:
        """Token ids of the prompt that choice `index` continues."""
        return self._choices()[index].prompt_ids

    def prompt_logprobs(self, index: int) -> list[Logprob]:
        """Of the prompt that choice `index` continues, one for each token but the first."""
        return next(state.logprobs for state in self._states if any(choice.index == index for choice in state.choices))

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Until every choice has ended. Raises ApiError when the engine refuses, fails or runs out of time."""
        try:
            async with aclosing(_merged([state.stream for state in self._states])) as events:
                async for position, choice, event in events:
                    delta = self._push(self._states[position], choice, event)
                    if delta is not None:
                        yield delta
            if not all(choice.ended for choice in self._choices()):
                raise InternalError("The engine ended a stream without a reason.")
        except Exception as error:
            self._end_all(end_reason(error))
            raise
        finally:
            self.close()

    def _push(self, state: _PromptState, choice: int, event: Event) -> Delta | None:
        if (failure := from_engine(event.refusal or event.finish_reason, event.message)) is not None:
            raise failure
        text = state.choices[choice]
        if text.ended:
            return None
        state.logprobs = event.prompt_logprobs or state.logprobs
        delta = text.push(event, state.logprobs)
        if event.token_ids:
            self._meter.tokens(text.index, len(event.token_ids))
        if delta is not None and delta.finish_reason is not None:
            if event.finish_reason is None:
                state.stream.finish_choice(choice)
            self._count_end(state, text, "length" if delta.finish_reason == "length" else "stop")
        return delta

    def _choices(self) -> list[ChoiceText]:
        return [choice for state in self._states for choice in state.choices]

    def _count_end(self, state: _PromptState, choice: ChoiceText, reason: str) -> None:
        self._meter.ended(reason, len(state.prompt.request.prompt_ids), choice.completion_tokens)

    def _end_all(self, reason: str | None) -> None:
        """End what has not ended; None where the engine never took it, which no metric counts."""
        for state in self._states:
            for choice in state.choices:
                if not choice.ended and reason is not None:
                    self._count_end(state, choice, reason)
                choice.ended = True

    def close(self) -> None:
        """Cancel what is unfinished. Idempotent, never blocks."""
        self._end_all("abort")
        for state in self._states:
            state.stream.close()

    def usage(self) -> Usage:
        """So far. Some clients ask with every token."""
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(choice.completion_tokens for choice in self._choices()),
            cached_tokens=sum(state.choices[0].cached_tokens for state in self._states),
            image_tokens=self._image_tokens,
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self._choices()),
            draft_tokens=sum(choice.draft_tokens for choice in self._choices()),
            accepted_tokens=sum(choice.accepted_tokens for choice in self._choices()),
        )


def end_reason(error: Exception) -> str | None:
    """What a metric calls the end of a sequence that failed so; None where the engine never took it."""
    if isinstance(error, BadRequest | Overloaded):
        return None
    return "timeout" if isinstance(error, DeadlineExceeded) else "error"


async def _next(position: int, events: AsyncIterator[tuple[int, Event]]) -> tuple[int, tuple[int, Event] | None]:
    return position, await anext(events, None)


async def _merged(streams: list[RequestStream]) -> AsyncGenerator[tuple[int, int, Event], None]:
    """(position of the stream, choice, event) of all streams as they arrive, without a buffer of its own."""
    if len(streams) == 1:
        async for choice, event in streams[0].events():
            yield 0, choice, event
        return
    iterators = [stream.events() for stream in streams]
    tasks = {asyncio.create_task(_next(position, events)) for position, events in enumerate(iterators)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                tasks.discard(task)
                position, item = task.result()
                if item is not None:
                    tasks.add(asyncio.create_task(_next(position, iterators[position])))
                    yield position, *item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
