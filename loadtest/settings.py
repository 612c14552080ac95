"""What a run is asked to do, checked: from the command line to frozen values. Used by all of `loadtest`."""

import argparse
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from loadtest.arguments import MAX_COUNT
from loadtest.arrivals import Arrival
from loadtest.http_client import Target

OBJECTIVES = ("ttft", "tpot", "e2e")
REPORT_SUFFIXES = (".html", ".png")

T = TypeVar("T")
Lengths = Literal["fixed", "uniform", "normal", "lognormal"]


class LoadTestError(Exception):
    """What the user must mend before or instead of measuring; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the requests look like."""

    workload: Literal["text", "prefix", "chat", "images"] = "text"
    lengths: Lengths = "fixed"
    input_tokens: int = 128
    output_tokens: int = 64
    spread: float = 0.5
    """Standard deviation over mean (normal, lognormal); half of the width over mean (uniform)."""
    prefix_tokens: int = 512
    prefix_groups: int = 4
    turns: int = 4
    images: int = 1
    image_sizes: tuple[tuple[int, int], ...] = ((512, 512),)
    image_format: Literal["png", "jpeg"] = "jpeg"
    seed: int = 0
    trace: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where requests go."""

    name: str
    url: str
    pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One amount of load: `concurrency` streams at a time, or `rate` requests a second, or (neither) a trace."""

    concurrency: int | None = None
    rate: float | None = None
    ramp: float = 0.0
    """Seconds in which the streams start, one after the other."""

    @property
    def label(self) -> str:
        """For tables."""
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        return f"{self.rate:g} a second" if self.rate is not None else "trace"

    @property
    def amount(self) -> float:
        """For the axis of a figure."""
        return self.concurrency or self.rate or 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A whole run."""

    servers: tuple[Server, ...]
    levels: tuple[Level, ...]
    shape: Shape
    api: Literal["chat", "completions"] = "chat"
    model: str | None = None
    api_key: str | None = None
    requests: int | None = None
    warmup: int = 4
    arrival: Arrival = "poisson"
    burst_size: int = 8
    ignore_eos: bool = False
    extra_body: dict[str, Any]
    timeout_seconds: float = 600.0
    goodput: dict[str, float]
    output: Path | None = None
    report: Path | None = None

    def num_requests(self, level: Level) -> int:
        """Requests (sessions, in a chat) of a level: as asked, else four a stream, or half a minute's arrivals."""
        if self.requests is not None:
            return self.requests
        return max(16, 4 * level.concurrency if level.concurrency else round(30 * (level.rate or 0)))


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The checked run. Raises LoadTestError."""
    trace = arguments.trace
    if trace is not None and (arguments.request_rate or arguments.concurrency or arguments.requests):
        raise LoadTestError(
            "--trace says itself when each request is sent: leave --concurrency, --request-rate, --requests out"
        )
    if arguments.concurrency and arguments.request_rate:
        raise LoadTestError("give --concurrency (closed loop) or --request-rate (open loop), not both")
    if arguments.ramp and (arguments.request_rate or trace is not None):
        raise LoadTestError("--ramp is for a closed loop (--concurrency)")
    if arguments.workload == "images" and arguments.api != "chat":
        raise LoadTestError("--workload images needs --api chat")
    given = vars(arguments)
    shape_fields = {field.name for field in dataclasses.fields(Shape)} - {"image_sizes"}
    shape = Shape(
        **{name: given[name] for name in shape_fields}, image_sizes=_listed(arguments.image_size, "--image-size", _size)
    )
    report = arguments.report
    if report is not None and report.suffix not in REPORT_SUFFIXES:
        raise LoadTestError(f"--report {report}: the name must end in {' or '.join(REPORT_SUFFIXES)}")
    for path in (arguments.output, report):
        if path is not None and not path.absolute().parent.is_dir():
            raise LoadTestError(f"{path}: there is no folder {path.absolute().parent}")
    return Settings(
        servers=_servers(arguments),
        levels=_levels(arguments),
        shape=shape,
        api=arguments.api,
        model=arguments.model,
        api_key=arguments.api_key,
        requests=arguments.requests,
        warmup=arguments.warmup,
        arrival=arguments.arrival,
        burst_size=arguments.burst_size,
        ignore_eos=arguments.ignore_eos,
        extra_body=_extra_body(arguments.extra_body),
        timeout_seconds=arguments.timeout,
        goodput=_objectives(arguments.goodput),
        output=arguments.output,
        report=arguments.report,
    )


def _levels(arguments: argparse.Namespace) -> tuple[Level, ...]:
    if arguments.trace is not None:
        return (Level(),)
    if arguments.request_rate:
        rates = _listed(arguments.request_rate, "--request-rate", float)
        if not all(0 < rate <= MAX_COUNT for rate in rates):
            raise LoadTestError(f"--request-rate {arguments.request_rate}: rates must be above 0")
        return tuple(Level(rate=rate) for rate in rates)
    counts = _listed(arguments.concurrency or "1,4,16", "--concurrency", int)
    if not all(1 <= count <= MAX_COUNT for count in counts):
        raise LoadTestError(f"--concurrency {arguments.concurrency}: counts must be 1 or more")
    return tuple(Level(concurrency=count, ramp=arguments.ramp) for count in counts)


def _servers(arguments: argparse.Namespace) -> tuple[Server, ...]:
    if arguments.compare:
        if arguments.url is not None or arguments.server_pid is not None:
            raise LoadTestError("--compare takes the place of --url and --server-pid")
        pairs = [pair.partition("=")[::2] for pair in arguments.compare]
        for name, url in pairs:
            if not name or "://" not in url or "/" in name:
                raise LoadTestError(
                    f"--compare {name or url}: write each server as NAME=URL, as in ours=http://127.0.0.1:8000"
                )
        if len({name for name, _ in pairs}) < len(pairs):
            raise LoadTestError("--compare: two servers have the same name")
        servers = tuple(Server(name=name, url=url) for name, url in pairs)
    else:
        servers = (Server(name="server", url=arguments.url or "http://127.0.0.1:8000", pid=arguments.server_pid),)
    for server in servers:
        try:
            Target.parse(server.url)
        except ValueError as error:
            raise LoadTestError(str(error)) from None
    return servers


def _objectives(text: str | None) -> dict[str, float]:
    """'ttft:2000,tpot:50' -> milliseconds by name."""
    limits: dict[str, float] = {}
    for part in (text or "").split(",") if text else ():
        name, _, value = part.partition(":")
        try:
            limits[name.strip()] = float(value)
        except ValueError:
            raise LoadTestError(
                f"--goodput {text}: {part!r} is not NAME:MILLISECONDS, as in ttft:2000,tpot:50"
            ) from None
        if name.strip() not in OBJECTIVES:
            raise LoadTestError(f"--goodput {text}: {name!r} is none of {', '.join(OBJECTIVES)}")
    return limits


def _extra_body(text: str | None) -> dict[str, Any]:
    try:
        extra = json.loads(text or "{}")
    except ValueError as error:
        raise LoadTestError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise LoadTestError("--extra-body must be a JSON object, as in '{\"temperature\": 0.7}'")
    return extra


def _size(text: str) -> tuple[int, int]:
    width, height = (int(side) for side in text.split("x"))
    if not 1 <= min(width, height) <= max(width, height) <= 16384:
        raise ValueError(text)
    return width, height


def _listed(text: str, flag: str, kind: Callable[[str], T]) -> tuple[T, ...]:
    """The parts between commas. Raises LoadTestError naming flag and part."""
    values = []
    for part in text.split(","):
        try:
            values.append(kind(part.strip()))
        except ValueError:
            example = {"--image-size": "512x512,1024x768", "--concurrency": "1,4,16", "--request-rate": "0.5,2,8"}[flag]
            raise LoadTestError(f"{flag} {text}: {part!r} is not right; write it as in {flag} {example}") from None
    return tuple(values)
