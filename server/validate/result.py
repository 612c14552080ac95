"""What the stages of `firstlight validate` find: checks, facts and curves. Pure; kept as JSON in the state file."""

from dataclasses import dataclass, field
from typing import Literal

from server.report.plot import Plot

Word = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the verdict. A failed one says why, and what to look at."""

    name: str
    outcome: Word
    value: str = ""
    """What was found, where that is a figure."""
    limit: str = ""
    """What it must be."""
    reason: str = ""
    """Why it failed or was skipped."""
    advice: str = ""
    """Of a failed one."""


def checked(name: str, problem: str, advice: str, value: str = "", limit: str = "") -> Check:
    """Failed where there is a problem."""
    if problem:
        return Check(name=name, outcome="failed", value=value, limit=limit, reason=problem, advice=advice)
    return Check(name=name, outcome="passed", value=value, limit=limit)


def skipped(name: str, reason: str) -> Check:
    """That does not apply, or could not be tried."""
    return Check(name=name, outcome="skipped", reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Figures for the report."""

    head: tuple[str, ...]
    rows: tuple[tuple[str | int | float | None, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """All that a stage found."""

    checks: tuple[Check, ...]
    facts: tuple[str, ...] = ()
    """Sentences for the report."""
    plots: tuple[Plot, ...] = ()
    tables: tuple[Table, ...] = field(default=())
    seconds: float = 0.0

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that make the verdict fail."""
        return tuple(check for check in self.checks if check.outcome == "failed")
