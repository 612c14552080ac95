"""The state of one request while it lives. Made by `Scheduler.add`, changed by the scheduler and `KVBlocks` only,
engine process.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto

from scheduler.guesses import Guesses
from scheduler.lookup import TextIndex
from scheduler.plan import ints
from scheduler.prefix_cache import CachedBlock
from scheduler.request import Request, TokenLogprob


class Status(Enum):
    """The one place where a sequence is."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Tokens known so far, of which the first `num_computed` have their keys and values in `blocks`."""

    request: Request
    arrival: int
    """Order of acceptance; unique."""
    deadline: float
    max_total: int
    """Tokens, prompt and output, at which the sequence ends with LENGTH."""
    tokens: "array[int]"
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
    next_image: int = 0
    """The first image with rows to compute."""
    num_pinned: int = 0
    """Images from `next_image` up to this one are encoded and pinned."""
    num_looked_up: int = 0
    """Images that were counted as encoder hits or misses."""
    prompt_scores: list[TokenLogprob] = field(default_factory=list)
    guesses: Guesses | None = None
    text_index: TextIndex | None = None
    """Of a running sequence whose tokens are guessed ahead; the index where they are looked up."""
    preempted: bool = False
    overtaken: int = 0
    """Sequences that were admitted before this one because it found too few blocks."""

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_ids)

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
