"""What rank 0 and its followers say to each other beside collectives: plans one way, readiness and reports the other.
Engine process and followers.

One PUSH/PULL pair a follower for plans, one PULL of rank 0 for what followers report; over ipc in the private folder of
a server, or tcp between machines. Frames are bounded and typed; what is malformed is a `FrameError`, upon which the
process ends, and with it the group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import zmq

from model_runtime.memory import PlanError
from model_runtime.plan_frames import FrameError, decode, encode
from model_runtime.rank_stats import RankStats
from scheduler.plan import StepPlan

MAX_FRAME_BYTES = 256 * 1024 * 1024
MAX_PLANS_AHEAD = 16
"""That a follower may have to read; it computes each together with rank 0, so there are never more than a few."""
WAIT_MS = 100


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


class LeaderLost(Exception):
    """Rank 0 has ended."""


class Followers:
    """Rank 0's side."""

    def __init__(self, endpoints: Endpoints, timeout_seconds: float) -> None:
        """`timeout_seconds`: until a follower that does not read is an assertion."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._plans = [_socket(self._context, zmq.PUSH) for _ in endpoints.plans]
        for socket, address in zip(self._plans, endpoints.plans, strict=True):
            socket.setsockopt(zmq.SNDTIMEO, round(timeout_seconds * 1000))
            socket.bind(address)
        self._reports = _socket(self._context, zmq.PULL)
        self._reports.bind(endpoints.reports)
        self._sent = 0
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
                    raise PlanError(
                        f"rank {message.rank} has another model, version or options than rank 0: "
                        "start serve with the same on all machines"
                    )
                facts[message.rank] = message.facts
        agreed = _least([own, *facts.values()])
        for socket in self._plans:
            socket.send(_encoder.encode(agreed))
        return agreed

    def send(self, plan: StepPlan) -> None:
        """To all. Raises AssertionError if one does not read."""
        frames = encode(plan, self._sent)
        self._sent += 1
        for rank, socket in enumerate(self._plans, start=1):
            try:
                socket.send_multipart(frames, copy=not plan.encode.pixels)
            except zmq.Again:
                raise AssertionError(f"rank {rank} does not read its plans") from None

    def wait_for_reports(self, timeout_ms: int) -> None:
        """Read what has come, or comes within the time."""
        while self._reports.poll(timeout_ms):
            timeout_ms = 0
            message = _decode(_reports, self._reports.recv())
            if not isinstance(message, Report) or not 1 <= message.stats.rank <= len(self._plans):
                raise FrameError(f"{message} is no report")
            self.stats[message.stats.rank] = message.stats

    def close(self) -> None:
        """The sockets."""
        self._context.destroy(linger=0)


class Leader:
    """A follower's side: the rank that decides."""

    def __init__(self, endpoints: Endpoints, rank: int) -> None:
        self._rank, self._received = rank, 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._plans = _socket(self._context, zmq.PULL)
        self._losses = self._plans.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._plans.connect(endpoints.plans[rank - 1])
        self._reports = _socket(self._context, zmq.PUSH)
        self._reports.connect(endpoints.reports)

    def agree(self, own: PoolFacts, wait: Callable[[], None]) -> PoolFacts:
        """This rank is ready; what all have room for, when all are. `wait` as in `Followers.agree`."""
        self._reports.send(_encoder.encode(Ready(self._rank, own)))
        while not self._plans.poll(WAIT_MS):
            self._check()
            wait()
        return _decode(_facts, self._plans.recv())

    def receive(self, timeout_ms: int) -> StepPlan | None:
        """The next plan; None if there is none within the time. Raises FrameError for another one, LeaderLost if there
        will be none."""
        if not self._plans.poll(timeout_ms):
            self._check()
            return None
        number, plan = decode([frame.buffer for frame in self._plans.recv_multipart(copy=False)])
        if number != self._received:
            raise FrameError(f"plan {number} comes as number {self._received}")
        self._received += 1
        return plan

    def _check(self) -> None:
        if self._losses.poll(0):
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
