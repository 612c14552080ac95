"""What the process that computes a long text is asked, and what it says. Without torch; used by both sides."""

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextWanted:
    """The second line that the process reads; the first is the configuration."""

    model: str
    """Path of the checkpoint."""
    token_ids: tuple[int, ...]
    """A text that is repeated up to `tokens`."""
    tokens: int
    seconds: float
    """After which the text ends where it is."""
    other_chunks: int
    """Tokens that are computed again in other chunks."""
    reference_rows: int
    """That are computed again by plain torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest between rows that were computed in two ways, relative to the largest number of a row."""

    logits: float
    cache: float
    position: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """After a chunk."""

    tokens: int
    seconds: float
    num_bytes: int
    """That the process, or the device, has taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextFound:
    """All that was found."""

    tokens: int
    chunk: int
    room: int
    """Tokens that there is memory for."""
    is_exact: bool
    """Whether compiled kernels promise the same bits."""
    is_rounded: bool
    """Whether rows, keys or values are kept in less than float32."""
    base_bytes: int
    """When the model was loaded."""
    block_bytes: int
    block_size: int
    num_pools: int
    """Tensors that hold the blocks."""
    page_bytes: int
    """What the system gives of each when its first byte is touched, if it can."""
    text_blocks: int
    """Of the whole text."""
    step_bytes: int
    moments: tuple[Moment, ...]
    alone: Difference | None
    """None: the model keeps states, so no row can be computed by itself."""
    other_chunks: Difference
    reference: Difference | None
    why_no_reference: str = ""


class Told(msgspec.Struct, tag="told"):
    """How far it is."""

    fraction: float
    what: str


class Done(msgspec.Struct, tag="done"):
    """The last line."""

    found: ContextFound


class CannotDo(msgspec.Struct, tag="cannot"):
    """The last line, where nothing could be computed."""

    why: str


Line = Told | Done | CannotDo
