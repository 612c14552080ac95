"""Limits and policy of the scheduler. Declared once here; the command line's options are made from these fields.

Read in the supervisor (to parse), the API process (admission) and the engine process (policy). Standard library only.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

MAX_STEP_DRAFTS = 32
"""Drafts in a step, of a sequence and of all together: memory is planned for their logits."""
MAX_BLOCK_SIZE = 2**14
"""Of all ranks that share sequences together; what is allowed for one, the runtime says."""

SpeculativeMethod = Literal["ngram", "suffix", "draft", "self", "mtp"]
SPECULATIVE_METHODS: tuple[str, ...] = get_args(SpeculativeMethod)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are guessed ahead, in vLLM's names."""

    method: SpeculativeMethod
    num_speculative_tokens: int
    """The most drafts of a sequence in a step; how many are worth it is found out."""
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    """ngram: the longest and the shortest run of tokens that is looked for in the text before."""
    model: str = ""
    """draft: a checkpoint with the model's vocabulary, smaller than the model."""
    num_draft_layers: int = 0
    """self: so many of the model's first layers are the draft model."""

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the rule."""
        if not 1 <= self.num_speculative_tokens <= MAX_STEP_DRAFTS:
            raise ValueError(f"num_speculative_tokens must be from 1 to {MAX_STEP_DRAFTS}")
        if not 1 <= self.lookup_min <= self.lookup_max <= 64:
            raise ValueError("prompt_lookup_min must be from 1 to prompt_lookup_max, and that at most 64")
        if self.method != "ngram" and not self.prompt_lookup_min is self.prompt_lookup_max is None:
            raise ValueError("prompt_lookup_min and prompt_lookup_max are for the method ngram")
        if (self.method == "draft") != bool(self.model):
            raise ValueError("model names the draft model, for the method draft and no other")
        if (self.method == "self") != (self.num_draft_layers > 0) or self.num_draft_layers < 0:
            raise ValueError("num_draft_layers is a positive number, for the method self and no other")

    @property
    def lookup_max(self) -> int:
        """prompt_lookup_max, or its default."""
        return 16 if self.prompt_lookup_max is None else self.prompt_lookup_max

    @property
    def lookup_min(self) -> int:
        """prompt_lookup_min, or its default."""
        return min(2, self.lookup_max) if self.prompt_lookup_min is None else self.prompt_lookup_min


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How much work a step may hold and how much may wait."""

    max_num_seqs: int = field(default=64, metadata={"help": "sequences that run at the same time"})
    max_num_batched_tokens: int = field(
        default=256, metadata={"help": "tokens computed in one step, all sequences together"}
    )
    prefill_share: float = field(
        default=0.25,
        metadata={"help": "share of a step's tokens and pixels that prompts may take while streams are running"},
    )
    max_encode_pixels: int = field(
        default=262_144,
        metadata={"help": "pixels of images encoded in one step, during which streams wait; one image may exceed it"},
    )
    block_size: int = field(
        default=16, metadata={"help": "tokens in a KV block, a power of two up to 256; on a GPU 256 whatever is set"}
    )
    max_queued_requests: int = field(
        default=256, metadata={"help": "sequences that may wait beyond the running ones; more get 429"}
    )
    max_queued_tokens: int = field(
        default=1_000_000, metadata={"help": "prompt tokens of all accepted sequences together; more get 429"}
    )
    request_timeout: float = field(
        default=600.0, metadata={"help": "seconds until an unfinished request ends with 408 or an error event"}
    )
    enable_prefix_caching: bool = field(default=True, metadata={"help": "reuse KV blocks of equal prompt beginnings"})
    max_state_checkpoints: int = field(
        default=32,
        metadata={
            "help": "for models with a state beside keys and values: states that the prefix cache keeps, each as large "
            "as that of a running sequence"
        },
    )
    speculative_config: SpeculativeConfig | None = field(
        default=None,
        metadata={
            "help": 'guess tokens ahead, as {"method": "ngram", "num_speculative_tokens": 12} says; methods are ngram, '
            "suffix, draft (with model), self (with num_draft_layers) and mtp; the output stays the same",
            "unit": "speculation",
        },
    )

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the rule."""
        sizes = ("max_num_seqs", "max_num_batched_tokens", "max_encode_pixels", "max_queued_tokens", "request_timeout")
        for name in sizes:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise ValueError(f"block_size must be from 1 to {MAX_BLOCK_SIZE}")
        if not 0 < self.prefill_share <= 1:
            raise ValueError("prefill_share must be in (0, 1]")
        for name in ("max_queued_requests", "max_state_checkpoints"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs: each sequence needs a token a step")

    @property
    def num_checkpoints(self) -> int:
        """States that are kept: none without a prefix cache."""
        return self.max_state_checkpoints if self.enable_prefix_caching else 0

    @property
    def num_draft_states(self) -> int:
        """States behind drafts, until it is known which hold: of all that a step may have."""
        if self.speculative_config is None:
            return 0
        return min(MAX_STEP_DRAFTS, self.max_num_seqs * self.speculative_config.num_speculative_tokens)

    @property
    def num_states(self) -> int:
        """Slots for states: of sequences that run, of drafts, and of those that are kept."""
        return self.max_num_seqs + self.num_draft_states + self.num_checkpoints

    @property
    def max_sampled_rows(self) -> int:
        """Rows of a step whose logits are computed."""
        return self.max_num_seqs + (0 if self.speculative_config is None else MAX_STEP_DRAFTS)

    @property
    def max_outstanding(self) -> int:
        """Sequences that may be running and waiting together."""
        return self.max_num_seqs + self.max_queued_requests
