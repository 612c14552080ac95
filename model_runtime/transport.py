"""What rank 0 and its followers say to each other beside collectives: plans one way, readiness and reports the other.
Engine process and followers.

One PUSH/PULL pair a follower for plans, one PULL of rank 0 for what followers report; over ipc in the private folder of
a server, or tcp between machines. Frames are bounded and typed; what is malformed is a `FrameError`, upon which the
process ends, and with it the group.
"""

import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NoReturn, TypeVar

import msgspec
import zmq

from model_runtime.memory.budget import PlanError
from model_runtime.plan_frames import Frame, FrameError, decode, encode
from model_runtime.rank_stats import RankStats
from scheduler.plan import ImageJobs, StepPlan

MAX_FRAME_BYTES = 256 * 1024 * 1024
SILENCE_SECONDS = 10.0
"""Without a report, until a follower on another machine is lost; they report once a second."""
LOOK_SECONDS = 0.5
"""The longest time that counts between two looks for reports: for longer this rank computed with them, or was
stopped."""
HEARTBEAT_MS = 2_000
"""How often a follower asks another machine whether it is there."""
MAX_PLANS_AHEAD = 16
"""That a follower may have to read; it computes each together with rank 0, so there are never more than a few."""
WAIT_MS = 100
LINGER_SECONDS = 1.0
"""For what a follower that is refused is told."""
UNLIKE = "has another model, version or options than rank 0: start serve with the same on all machines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where the sockets are."""

    plans: tuple[str, ...]
    """Of each follower, rank 1 first."""
    reports: str


class PoolFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a rank has room for, or, to followers, what all have."""

    num_blocks: int
    max_model_len: int
    max_image_pixels: int
    """0: the rank encodes none."""
    likeness: str = ""
    """Equal in all ranks: what they compute, and how (`executor.likeness`)."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready", forbid_unknown_fields=True):
    """Follower -> rank 0: the weights are loaded."""

    rank: int
    facts: PoolFacts


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report", forbid_unknown_fields=True):
    """Follower -> rank 0: what it has done."""

    stats: RankStats


Message = TypeVar("Message")
_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(Ready | Report)
_facts = msgspec.msgpack.Decoder(PoolFacts)


def _socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, MAX_PLANS_AHEAD)
    return socket


class StepEnd:
    """Rank 0 -> the others of the first stage, in a pipeline: the step that began first ends now. Who follows must do
    the same in the same order, and cannot know when rank 0 begins another one before."""


END_FRAME = b"end"


class LeaderLost(Exception):
    """Rank 0 has ended."""


class Silence:
    """How long nothing was heard of each follower."""

    def __init__(self, ranks: Sequence[int], limit: float) -> None:
        self._seconds, self._limit, self._looked = dict.fromkeys(ranks, 0.0), limit, time.monotonic()

    def heard(self, rank: int) -> None:
        """Of a rank."""
        self._seconds[rank] = 0.0

    def check(self) -> None:
        """After each look for reports. Raises AssertionError for a rank that is lost."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, LOOK_SECONDS), now
        for rank, seconds in self._seconds.items():
            self._seconds[rank] = seconds + passed
            assert seconds + passed <= self._limit, f"rank {rank} was silent for {self._limit:.0f} s"


class Followers:
    """Rank 0's side."""

    def __init__(self, endpoints: Endpoints, timeout_seconds: float, silence_seconds: float = inf) -> None:
        """`timeout_seconds`: until a follower that does not read is an assertion; `silence_seconds`: until one that
        does not report is."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._plans = [_socket(self._context, zmq.PUSH) for _ in endpoints.plans]
        for socket, address in zip(self._plans, endpoints.plans, strict=True):
            socket.setsockopt(zmq.SNDTIMEO, round(timeout_seconds * 1000))
            socket.bind(address)
        self._reports = _socket(self._context, zmq.PULL)
        self._reports.bind(endpoints.reports)
        self._sent = 0
        self._silence = Silence(range(1, len(self._plans) + 1), silence_seconds)
        self.stats: dict[int, RankStats] = {}
        """The newest of each follower, by rank; `wait_for_reports` reads them."""

    def agree(self, own: PoolFacts, wait: Callable[[], None]) -> PoolFacts:
        """Wait until every follower is ready; the least of what all have room for, which they are told. `wait` is
        called several times a second, and may raise. Raises PlanError for a follower that would compute something else
        than this rank."""
        facts: dict[int, PoolFacts] = {}
        while len(facts) < len(self._plans):
            wait()
            if self._reports.poll(WAIT_MS):
                message = _decode(_reports, self._reports.recv())
                if not isinstance(message, Ready) or not 1 <= message.rank <= len(self._plans):
                    raise FrameError(f"{message} comes before every rank is ready")
                if message.facts.likeness != own.likeness:
                    self._refuse(message.rank, own)
                facts[message.rank] = message.facts
        agreed = _least([own, *facts.values()])
        for socket in self._plans:
            socket.send(_encoder.encode(agreed))
        return agreed

    def _refuse(self, rank: int, own: PoolFacts) -> NoReturn:
        """The follower is told what this rank is, and sees that it is not alike."""
        self._plans[rank - 1].send(_encoder.encode(own))
        self._context.destroy(linger=round(LINGER_SECONDS * 1000))
        raise PlanError(f"rank {rank} {UNLIKE}")

    def send(self, plan: StepPlan, blind: Container[int] = ()) -> None:
        """To all; without what is to be encoded to those that know no images. Raises AssertionError if one does not
        read."""
        frames = encode(plan, self._sent)
        seen = frames if not plan.encode.pixels else encode(replace(plan, encode=ImageJobs()), self._sent)
        self._sent += 1
        for rank in range(1, len(self._plans) + 1):
            self._send(rank, seen if rank in blind else frames, copy=not plan.encode.pixels)

    def send_end(self, ranks: Iterable[int]) -> None:
        """To these. Raises AssertionError if one does not read."""
        for rank in ranks:
            self._send(rank, [END_FRAME], copy=True)

    def _send(self, rank: int, frames: Sequence[Frame], *, copy: bool) -> None:
        try:
            self._plans[rank - 1].send_multipart(frames, copy=copy)
        except zmq.Again:
            raise AssertionError(f"rank {rank} does not read its plans") from None

    def wait_for_reports(self, timeout_ms: int) -> None:
        """Read what has come, or comes within the time. Raises AssertionError for a follower that is lost."""
        while self._reports.poll(timeout_ms):
            timeout_ms = 0
            message = _decode(_reports, self._reports.recv())
            if not isinstance(message, Report) or not 1 <= message.stats.rank <= len(self._plans):
                raise FrameError(f"{message} is no report")
            self.stats[message.stats.rank] = message.stats
            self._silence.heard(message.stats.rank)
        self._silence.check()

    def close(self) -> None:
        """The sockets."""
        self._context.destroy(linger=0)


class Leader:
    """A follower's side: the rank that decides."""

    def __init__(self, endpoints: Endpoints, rank: int) -> None:
        self._rank, self._received = rank, 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._plans = _socket(self._context, zmq.PULL)
        if endpoints.plans[rank - 1].startswith("tcp:"):  # which alone would not tell of a machine without power
            self._plans.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._plans.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5 * HEARTBEAT_MS)
        self._losses = self._plans.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._plans.connect(endpoints.plans[rank - 1])
        self._reports = _socket(self._context, zmq.PUSH)
        self._reports.connect(endpoints.reports)

    def agree(self, own: PoolFacts, wait: Callable[[], None]) -> PoolFacts:
        """This rank is ready; what all have room for, when all are. `wait` as in `Followers.agree`. Raises PlanError
        where this rank would compute something else than rank 0."""
        self._reports.send(_encoder.encode(Ready(self._rank, own)))
        while not self._plans.poll(WAIT_MS):
            self._check()
            wait()
        agreed = _decode(_facts, self._plans.recv())
        if agreed.likeness != own.likeness:
            raise PlanError(f"this rank {UNLIKE}")
        return agreed

    def receive(self, timeout_ms: int) -> StepPlan | StepEnd | None:
        """The next message; None if there is none within the time. Raises FrameError for another one, LeaderLost if
        there will be none."""
        if not self._plans.poll(timeout_ms):
            self._check()
            return None
        frames = [frame.buffer for frame in self._plans.recv_multipart(copy=False)]
        if frames == [END_FRAME]:
            return StepEnd()
        number, plan = decode(frames)
        if number != self._received:
            raise FrameError(f"plan {number} comes as number {self._received}")
        self._received += 1
        return plan

    def _check(self) -> None:
        if self._losses.poll(0) and not self._plans.poll(0):
            raise LeaderLost("rank 0 has ended")

    def report(self, stats: RankStats) -> None:
        """Nothing, if rank 0 has not read the last ones: the next has their sums."""
        if self._reports.poll(0, zmq.POLLOUT):
            self._reports.send(_encoder.encode(Report(stats)))

    def close(self) -> None:
        """The sockets."""
        self._context.destroy(linger=0)


def _decode(decoder: "msgspec.msgpack.Decoder[Message]", frame: bytes) -> Message:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FrameError(f"a malformed frame: {error}") from None


def _least(facts: list[PoolFacts]) -> PoolFacts:
    return PoolFacts(
        min(fact.num_blocks for fact in facts),
        min(fact.max_model_len for fact in facts),
        min((fact.max_image_pixels for fact in facts if fact.max_image_pixels), default=0),
        facts[0].likeness,
    )
