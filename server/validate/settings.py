"""What `firstlight validate` was asked for: its own flags, and those of `serve` that it hands on. Supervisor side."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from model_runtime.config import RuntimeConfig
from server.config import SECTIONS, ServeConfig, resolve
from server.config import add_arguments as add_options
from server.options import OptionError, options_of

NOT_HANDED_ON = ("host", "port", "health_port", "access_log", "log_level")
"""Options of `serve` that the gate chooses."""
STAGES: Mapping[str, str] = {
    "memory": "memory as planned",
    "align": "alignment",
    "answers": "single requests",
    "images": "images",
    "curves": "latency and throughput",
    "preemption": "sequences that lose their memory",
    "context": "long context",
    "soak": "soak",
}
"""The stages in the order in which they run, and what they are called in the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long the stages may take. Where less fits in, a stage does less and says so."""

    prompts: int
    """Of the comparisons of single requests."""
    output_tokens: int
    seen_questions: int
    """Of each task about what pictures show, at most."""
    curve_seconds: float
    input_lengths: tuple[int, ...]
    concurrencies: tuple[int, ...]
    context_tokens: int
    context_seconds: float
    needle_lengths: tuple[int, ...]
    soak_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The whole run."""

    folder: Path | None
    stages: tuple[str, ...]
    effort: Effort
    serve_arguments: tuple[str, ...]
    """Flags for the child; the model comes before them."""
    align_arguments: tuple[str, ...]
    """The same for `firstlight align`."""


USUAL = Effort(
    prompts=8,
    output_tokens=32,
    seen_questions=16,
    curve_seconds=120.0,
    input_lengths=(128, 512, 2048),
    concurrencies=(1, 4, 16),
    context_tokens=2**20,
    context_seconds=90.0,
    needle_lengths=(512, 2048),
    soak_seconds=120.0,
)
QUICK = Effort(
    prompts=3,
    output_tokens=12,
    seen_questions=4,
    curve_seconds=20.0,
    input_lengths=(128,),
    concurrencies=(1, 4),
    context_tokens=2048,
    context_seconds=15.0,
    needle_lengths=(512,),
    soak_seconds=20.0,
)
MOST_MINUTES = 7 * 24 * 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command, and all of `serve`."""
    group = parser.add_argument_group("validation")
    group.add_argument("--quick", action="store_true", help="less of everything, in about a minute")
    group.add_argument("--soak-minutes", type=float, metavar="N", help="length of the soak (default: 2)")
    group.add_argument(
        "--context-minutes", type=float, metavar="N", help="most time for computing the long text (default: 1.5)"
    )
    group.add_argument(
        "--reference", metavar="FILE", help="what align --dump wrote, for the alignment (default: transformers)"
    )
    group.add_argument("--only", metavar="STAGE,…", help=f"run only these of {', '.join(STAGES)}")
    group.add_argument("--skip", metavar="STAGE,…", help="leave these out")
    group.add_argument(
        "--folder", type=Path, help="where reports, log and progress go (default: firstlight-validate/NAME OF MODEL)"
    )
    add_options(parser)


def settings_of(arguments: argparse.Namespace, environment: Mapping[str, str]) -> tuple[Settings, ServeConfig]:
    """Checked; the second is what the child will make of the same options. Raises OptionError."""
    usual = QUICK if arguments.quick else USUAL
    effort = replace(
        usual,
        soak_seconds=_seconds(arguments.soak_minutes, "--soak-minutes", usual.soak_seconds),
        context_seconds=_seconds(arguments.context_minutes, "--context-minutes", usual.context_seconds),
    )
    config = resolve(arguments, environment)
    if config.runtime.nnodes > 1:
        raise OptionError("validate starts its server on this machine alone: --nnodes must be 1")
    settings = Settings(
        folder=arguments.folder,
        stages=_stages(arguments.only, arguments.skip),
        effort=effort,
        serve_arguments=_handed_on(arguments, list(SECTIONS.values())),
        align_arguments=_handed_on(arguments, [RuntimeConfig])
        + (() if arguments.reference is None else ("--reference", str(Path(arguments.reference).absolute()))),
    )
    return settings, config


def _seconds(minutes: float | None, flag: str, usual: float) -> float:
    if minutes is None:
        return usual
    if not 0 < minutes <= MOST_MINUTES:
        raise OptionError(f"{flag} must be above 0 and at most {MOST_MINUTES}")
    return minutes * 60


def _stages(only: str | None, skip: str | None) -> tuple[str, ...]:
    left_out = _names(skip, "--skip") if skip else set()
    wanted = _names(only, "--only") if only else set(STAGES)
    chosen = tuple(name for name in STAGES if name in wanted - left_out)
    if not chosen:
        raise OptionError("--only and --skip leave no stage")
    return chosen


def _names(text: str, flag: str) -> set[str]:
    names = {name.strip() for name in text.split(",")}
    for name in sorted(names - set(STAGES)):
        raise OptionError(f"{flag}: {name!r} is none of {', '.join(STAGES)}")
    return names


def _handed_on(arguments: argparse.Namespace, sections: Sequence[type]) -> tuple[str, ...]:
    """The flags of these sections that were given, as they were given."""
    given: list[str] = ["--config", arguments.config] if arguments.config is not None else []
    for option in options_of(sections):
        value = getattr(arguments, option.name)
        if value is None or option.name in NOT_HANDED_ON:
            continue
        if option.annotation is bool:
            given.append(option.flag if value else "--no-" + option.flag.removeprefix("--"))
        else:
            for part in value if isinstance(value, list) else [value]:
                given += [option.flag, str(part)]
    return tuple(given)
