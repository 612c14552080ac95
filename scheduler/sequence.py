"""The state of one request while it lives. Made by `Scheduler.add`, changed by the scheduler and `KVBlocks` only,
engine process.
"""

from array import array
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto

from scheduler.guesses import Guesses
from scheduler.lookup import TextIndex
from scheduler.plan import NO_STATE, doubles, ints
from scheduler.prefix_cache import CachedBlock
from scheduler.request import Request, TokenLogprob


class Status(Enum):
    """The one place where a sequence is."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True)
class StateUse:
    """Which slots have to do with a sequence of a model with states; see `state_slots`."""

    own: int = NO_STATE
    """Its own slot, as long as it runs."""
    newest: int = NO_STATE
    """Where the state behind its computed tokens is: its own slot, or a checkpoint's."""
    written: list[tuple[int, int]] = field(default_factory=list)
    """States that its step in flight leaves: how many tokens they are behind, and their slots."""
    parting: int = 0
    """How much of its text the prefix cache had when it began to run, if a state was missing there; else 0."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Tokens known so far, of which the first `num_computed` have their keys and values in `blocks`."""

    request: Request
    arrival: int
    """Order of acceptance; unique."""
    deadline: float
    longest: InitVar[int]
    """Tokens, prompt and output, that a sequence may have at most."""
    max_total: int = field(init=False)
    """Tokens, prompt and output, at which this one ends with LENGTH, or with its prompt if that is pooled."""
    tokens: "array[int]" = field(init=False)
    """int32: prompt, then output."""
    num_prompt: int = field(init=False)
    """Prompt tokens."""
    status: Status = Status.WAITING
    num_computed: int = 0
    blocks: "array[int]" = field(default_factory=ints)
    """int32 block table; covers num_computed tokens and those of the step in flight."""
    full_blocks: list[CachedBlock] = field(default_factory=list)
    """What the first full blocks of `tokens` hold, for the prefix cache; extended when needed, never wrong."""
    num_registered: int = 0
    """Blocks that came from the prefix cache or were offered to it."""
    prefix_hit: int | None = None
    """Prompt tokens found in the prefix cache when the sequence first ran; None before."""
    image_starts: tuple[int, ...] = ()
    image_ends: tuple[int, ...] = ()
    """First row of each image of the prompt, and one past its last."""
    image_end: int = 0
    """One past the last row that is an image's; 0 for text."""
    is_adapted: bool = False
    """The model's adapter changes its keys and values."""
    next_image: int = 0
    """The first image with rows to compute."""
    num_pinned: int = 0
    """Images from `next_image` up to this one are encoded and pinned."""
    num_looked_up: int = 0
    """Images that were counted as encoder hits or misses."""
    state: StateUse = field(default_factory=StateUse)
    prompt_scores: list[TokenLogprob] = field(default_factory=list)
    guesses: Guesses | None = None
    text_index: TextIndex | None = None
    """Of a running sequence whose tokens are guessed ahead; the index where they are looked up."""
    pool_sum: "array[float]" = field(default_factory=doubles)
    """float64 [C]: of the rows up to `num_computed`, where they are summed; means nothing before the first step."""
    in_flight: bool = False
    """A step that is planned and not committed computes tokens of it."""
    preempted: bool = False
    overtaken: int = 0
    """Sequences that were admitted before this one because it found too few blocks."""

    def __post_init__(self, longest: int) -> None:
        request = self.request
        self.num_prompt, self.tokens = len(request.prompt_ids), request.prompt_ids + request.output_ids
        self.max_total = min(self.num_prompt + (0 if request.pooling else request.sampling.max_tokens), longest)

    def wait_again(self) -> None:
        """It was preempted: it computes its tokens again."""
        self.status, self.preempted = Status.WAITING, True
        self.guesses = self.text_index = None
        self.prompt_scores.clear()

    @property
    def num_outputs(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Known tokens to compute before the next one can be sampled; at least 1."""
        return len(self.tokens) - self.num_computed

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still owed: then every row of it must be computed."""
        return self.request.sampling.prompt_logprobs >= 0 and self.num_outputs == 0

    @property
    def needs_every_row(self) -> bool:
        """Whether no row of the prompt can be taken from the prefix cache, which has keys and values only."""
        return self.scores_prompt or self.request.pooling == "mean"

    @property
    def room_to_start(self) -> int:
        """Tokens that it must find blocks for: those that are known, and one that it samples."""
        return len(self.tokens) + (self.request.pooling is None)
