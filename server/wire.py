"""Messages between the processes: tagged msgspec structs, size-bounded, versioned at the handshake. What both sides
know as a frozen dataclass (sampling parameters, facts of the model) travels as that and is checked as strictly.

Used by the API process (`client.py`), the engine process (`engine.py`) and the supervisor. Token ids travel as raw
int32 buffers, pixels as frames of their own behind a Submit (`wire_submit.py`). Nothing here imports torch; nothing
here is pickled. A frame that does not decode is a `WireError`.
"""

from array import array
from typing import TypeVar

import msgspec

from model_runtime.config import RuntimeInfo
from model_runtime.rank_stats import RankStats
from scheduler.request import Pooling, SamplingParams

WIRE_VERSION = 10
MAX_FRAME_BYTES = 256 * 1024 * 1024
SUPERVISOR = b"supervisor"
"""ZeroMQ identity of the supervisor."""


class WireError(Exception):
    """A frame that is too large, malformed, or of another version."""


class ImageHeader(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """An image of a prompt, all but its pixels; the fields of `scheduler.request.Image` and `plan.ImagePixels`."""

    key: bytes
    num_embeddings: int
    tiles: int
    height: int
    width: int
    rows: int
    cols: int
    image_height: int
    image_width: int
    has_pixels: bool
    """The pixels follow in a frame of their own."""


class Submit(msgspec.Struct, frozen=True, tag="submit", kw_only=True):
    """API -> engine: start a sequence. A frame of pixels follows for each of `images` that has them, in order."""

    seq_id: int
    prompt_ids: bytes
    sampling: SamplingParams
    priority: int
    deadline: float
    cache_salt: bytes
    leader: int | None
    images: tuple[ImageHeader, ...] = ()
    spans: bytes = b""
    """int32 [E, 4]: offset, length, image and first embedding of each `scheduler.request.Span`."""
    rope_positions: bytes = b""
    """int32 [L, 3], or empty."""
    rope_delta: int = 0
    output_ids: bytes = b""
    """int32: as in `scheduler.request.Request`."""
    pooling: Pooling | None = None


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """API -> engine: forget these sequences. Idempotent; unknown ids are ignored, since the end may be on its way."""

    seq_ids: list[int]


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token's log-probability and its alternatives, ids and values in parallel, descending."""

    value: float
    top_ids: list[int] = []
    top_values: list[float] = []
    rank: int = 0
    """As in `scheduler.plan.RowLogprobs.ranks`."""


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`scheduler.request.TokenEvent` on the wire, or the class name of the SchedulerError that refused the sequence."""

    seq_id: int
    token_ids: list[int] = []
    logprobs: list[Logprob] = []
    prompt_logprobs: list[Logprob] = []
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_token_id: int | None = None
    message: str = ""
    refusal: str = ""
    num_drafts: int = 0
    pooled: bytes = b""
    """float64 [C]"""


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Engine -> API: gauges and monotone counters since the engine started; sent with progress and as a heartbeat."""

    generation: int
    step_id: int
    last_step_time: float
    """time.monotonic() of the last finished step (system-wide on Linux), 0 before the first."""
    busy: bool
    """Whether there is work that a healthy engine would be stepping on."""
    running: int
    waiting: int
    free_blocks: int
    """Blocks that no sequence uses, cached ones included: what a new request could take."""
    cached_blocks: int
    """Those of the free blocks that hold a reusable prompt beginning."""
    total_blocks: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    generation_tokens: int
    encoder_bytes: int = 0
    """Of image embeddings that are kept, of the `encoder_cache_bytes` that `RuntimeInfo` tells."""
    encoder_hits: int = 0
    """Images that a sequence needed and found encoded."""
    images_encoded: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    """As in `scheduler.stats.SpeculationStats`."""
    ranks: tuple[RankStats, ...] = ()
    """Where there are several."""


class Events(msgspec.Struct, frozen=True, tag="events"):
    """Engine -> API: everything that a step produced."""

    events: list[Event]
    stats: Stats


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Engine -> API: ready to serve."""

    version: int
    generation: int
    info: RuntimeInfo
    stats: Stats
    replica: int = 0
    """Whose engine it is. Generations are numbered through all replicas."""


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Engine -> supervisor and API: how far the start has come, 0..1."""

    generation: int
    stage: str
    fraction: float
    replica: int = 0


class EngineDown(msgspec.Struct, frozen=True, tag="engine_down"):
    """Supervisor -> API: this engine is gone."""

    generation: int
    reason: str
    from_outside: bool = False
    """Somebody else may have done it: a person, the kernel for want of memory, a machine that gave it no time."""
    replica: int = 0


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Supervisor -> API: from now on, tell me where you listen and how the engine's start goes on."""


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """API -> supervisor: the address that clients use."""

    url: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Supervisor -> API: take no new work and exit when the accepted requests are done, or after `timeout` seconds."""

    timeout: float


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """API -> supervisor: the engine of this generation sent nonsense; replace it."""

    generation: int
    reason: str


class Health(msgspec.Struct, frozen=True, tag="health"):
    """API -> supervisor, several times a second: what the health port answers."""

    unready: str | None
    """Why a request would not run; None when it would."""
    overloaded: bool
    replicas: tuple[Stats | None, ...]
    """Of each engine; None while there is none."""


ToEngine = Submit | Abort
ToApi = Hello | Loading | Events | Stats | EngineDown | Drain | Watch
StartReport = Listening | Loading | Hello
ToSupervisor = StartReport | Broken | Health

Message = TypeVar("Message")
_encoder = msgspec.msgpack.Encoder()
_to_engine: "msgspec.msgpack.Decoder[ToEngine]" = msgspec.msgpack.Decoder(ToEngine)
_to_supervisor: "msgspec.msgpack.Decoder[ToSupervisor]" = msgspec.msgpack.Decoder(ToSupervisor)
_to_api: "msgspec.msgpack.Decoder[ToApi]" = msgspec.msgpack.Decoder(ToApi)


def encode(message: ToEngine | ToApi | ToSupervisor) -> bytes:
    """One frame. Raises WireError above MAX_FRAME_BYTES."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return frame


def _decode(decoder: "msgspec.msgpack.Decoder[Message]", frame: bytes) -> Message:
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"malformed frame: {error}") from None


def decode_to_engine(frame: bytes) -> ToEngine:
    """Raises WireError."""
    return _decode(_to_engine, frame)


def decode_to_api(frame: bytes) -> ToApi:
    """Raises WireError."""
    return _decode(_to_api, frame)


def decode_to_supervisor(frame: bytes) -> ToSupervisor:
    """Raises WireError."""
    return _decode(_to_supervisor, frame)


def engine_identity(generation: int) -> bytes:
    """ZeroMQ identity of the engine process of a generation."""
    return b"engine-%d" % generation


def unpack_ids(raw: bytes) -> "array[int]":
    """The int32 token ids of a Submit message. Raises WireError."""
    if len(raw) % 4:
        raise WireError(f"{len(raw)} bytes are not a list of int32 token ids")
    ids = array("i")
    ids.frombytes(raw)
    return ids
