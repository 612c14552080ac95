"""What the scheduler is asked to do, and what it says back: requests and token events.

Owned by the scheduler package; made by `server/engine.py` from wire messages, in the engine process. A request here is
one sequence: the n choices of an API request are n requests that name the same leader.
"""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias

from scheduler.plan import ImagePixels, ints

Pooling: TypeAlias = Literal["mean", "last"]
"""What is made of a prompt's hidden states instead of an output: the sum of all, of which the owner makes the mean, or
the last one."""


class FinishReason(StrEnum):
    """Why a sequence ended. Every accepted request ends with exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"
    DEAD_END = "dead_end"
    """The request's own grammar and bans left no token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGrammar:
    """What an output must match. Checked by the gateway, obeyed by `server/grammar/matchers.py`; only carried here."""

    source: str
    """As the grammar library takes it."""
    json_after: str | None = None
    """The output is JSON from this mark on, "" from its beginning; None where none of it is."""
    json_begins: tuple[str, ...] = ()
    """Where not all of that is JSON: what stands before each piece."""
    close_before_max_tokens: bool = False
    """Towards max_tokens also ban what would leave too few tokens for it to be whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to end. Values are validated by the gateway; meaning as in `plan.SampleRows`."""

    max_tokens: int
    """At most this many output tokens, >= 1; the scheduler also ends a sequence at the model's maximum length."""
    min_tokens: int = 0
    """Ban eos_token_ids and stop_token_ids until this many tokens were produced."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    """uint64: the random stream of this sequence, already mixed from (request seed, choice)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    """End the sequence with STOP; empty under ignore_eos."""
    stop_token_ids: tuple[int, ...] = ()
    """End the sequence with STOP and are reported as the stop token."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that may not be produced; each non-empty."""
    logprobs: int = -1
    """-1 none, else the number of alternatives per output token."""
    prompt_logprobs: int = -1
    """-1 none, else the number of alternatives per prompt token (no prefix-cache hits are used then)."""
    grammar: OutputGrammar | None = None
    """Bans every token with which the output could not go on to match it."""


class Span(NamedTuple):
    """`length` tokens of the prompt from `offset` on are embeddings `first`, `first` + 1, ... of an image."""

    offset: int
    length: int
    image: int
    """Index into `PromptImages.images`."""
    first: int

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image of a prompt."""

    key: bytes
    """32 bytes: hash of the decoded content, the preprocessing fingerprint and the cache salt. Equal keys are equal
    embeddings."""
    num_embeddings: int
    num_pixels: int
    """Of `pixels`: the cost of encoding it."""
    pixels: ImagePixels | None
    """None where the sender knows that a live request has brought them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptImages:
    """The images of a prompt and where they stand."""

    images: tuple[Image, ...] = ()
    """In order of appearance, each with at least one span; equal images may come twice."""
    spans: tuple[Span, ...] = ()
    """Ascending, disjoint; those of an image follow each other."""
    rope_positions: "array[int]" = field(default_factory=ints)
    """int32 [L, 3] for a prompt of L tokens: temporal, row and column position (M-RoPE); empty for other models.
    A function of the ids and the images before it, so that prompts which begin alike share their blocks."""
    rope_delta: int = 0
    """With rope_positions: the token at position p >= L has p + rope_delta in all three."""


NO_IMAGES = PromptImages()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to generate."""

    seq_id: int
    """Unique among live requests; chosen by the caller."""
    prompt_ids: "array[int]"
    """int32, non-empty."""
    sampling: SamplingParams
    priority: int = 0
    """Lower is served first."""
    deadline: float | None = None
    """On the clock that `plan(now)` is given; past it the request ends with TIMEOUT."""
    cache_salt: bytes = b""
    """Requests with different salts never share a KV block."""
    leader: int | None = None
    """seq_id of a request with the same prompt (n > 1): wait for its prefill and share its blocks."""
    images: PromptImages = NO_IMAGES
    pooling: Pooling | None = None
    """Ends with STOP and the pooled hidden states when the prompt is computed; nothing is sampled."""
    output_ids: "array[int]" = field(default_factory=ints)
    """int32: output tokens that an engine before this one has produced and told. The sequence goes on behind them as
    that engine would have; its events tell of what follows."""


class TokenLogprob(NamedTuple):
    """Log-probability of one token and of its most likely alternatives, (id, value) descending."""

    value: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0
    """As in `plan.RowLogprobs.ranks`."""


class TokenEvent(NamedTuple):
    """What happened to one sequence in a step. `finish_reason` is set exactly once, on its last event.

    A named tuple, made in half the time of a frozen dataclass: there is one for every token.
    """

    seq_id: int
    token_ids: tuple[int, ...] = ()
    """In order; more than one where drafts held."""
    num_drafts: int = 0
    """Drafts that the step computed; all tokens but the last were drafts that held."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token of token_ids when asked for, else empty."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """On the first event only: one per prompt token but the first, when asked for."""
    cached_tokens: int = 0
    """On the first event with a token: prompt tokens that came from the prefix cache."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The member of stop_token_ids that ended the sequence (not set for end-of-sequence tokens)."""
    message: str = ""
    """What went wrong, for ERROR and TIMEOUT."""
    pooled: bytes = b""
    """float64 [C]: the final norm's output, summed as `Request.pooling` says."""


class SchedulerError(Exception):
    """A request that the scheduler does not accept; nothing of it is kept."""


class NeverFits(SchedulerError):
    """The request can never run: its prompt and one token exceed the model length or the KV pool, or one of its images
    the memory for images."""

    def __init__(self, needed: int, limit: int, what: str) -> None:
        super().__init__(f"the request needs {needed} {what}, and at most {limit} can ever be had")
        self.needed, self.limit, self.what = needed, limit, what


class PixelsMissing(SchedulerError):
    """The request names an image without its pixels, and no live request has brought them. Send it again with them."""


class QueueFull(SchedulerError):
    """The queue is at its limit in requests or tokens."""
