"""The report of a validation: one page and one JSON document of the same. Used by `command.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from server.report.page import Cell, Outcome, Page
from server.validate.result import Check, StageResult
from server.validate.settings import STAGES

OVERVIEW = ("part", "outcome", "passed", "failed", "skipped", "seconds")
HEAD = ("check", "outcome", "found", "must be", "why, and what to look at")


def verdict(results: Mapping[str, StageResult], missing: tuple[str, ...]) -> tuple[bool, str]:
    """Whether all is well, in a sentence. `missing` are the stages that did not come to their turn."""
    checks = [check for result in results.values() for check in result.checks]
    failed = [f"{STAGES[name]}: {check.name}" for name, result in results.items() for check in result.failed]
    skipped = sum(check.outcome == "skipped" for check in checks)
    if failed:
        return False, f"{len(failed)} of {len(checks)} checks failed ({'; '.join(failed)})"
    if missing:
        return False, f"not finished: {', '.join(STAGES[name] for name in missing)} did not run"
    passed = len(checks) - skipped
    if not passed:
        return False, "nothing could be checked"
    return True, f"{passed} checks passed, {skipped} did not apply"


def document(
    results: Mapping[str, StageResult], missing: tuple[str, ...], conditions: Mapping[str, Any]
) -> dict[str, Any]:
    """JSON values."""
    passed, sentence = verdict(results, missing)
    stages = {name: msgspec.to_builtins(result) for name, result in results.items()}
    return {"passed": passed, "verdict": sentence, "conditions": dict(conditions), "stages": stages}


def page(results: Mapping[str, StageResult], missing: tuple[str, ...], conditions: Mapping[str, Any]) -> Page:
    """The report for people."""
    made = Page(f"firstlight validate: {conditions['model']}", f"{conditions['time']}, {conditions['processor']}")
    made.verdict(*verdict(results, missing))
    failed = [_row(check, STAGES[name]) for name, result in results.items() for check in result.failed]
    if failed:
        made.heading("What failed")
        _table(made, ("part", *HEAD), failed)
    made.heading("Parts")
    made.table(OVERVIEW, [_counts(STAGES[name], result) for name, result in results.items()])
    for name, result in results.items():
        made.heading(STAGES[name].capitalize())
        for fact in result.facts:
            made.text(fact)
        _table(made, HEAD, [_row(check)[1:] for check in result.checks])
        for table in result.tables:
            made.table(table.head, table.rows)
        if result.plots:
            made.plots(result.plots)
    made.heading("Conditions")
    made.verbatim(str(conditions["command"]))
    made.folded("everything", msgspec.json.format(msgspec.json.encode(conditions), indent=1).decode())
    return made


def _counts(title: str, result: StageResult) -> tuple[Cell, ...]:
    words = [check.outcome for check in result.checks]
    outcome = Outcome("failed" if result.failed else "passed" if "passed" in words else "skipped")
    return title, outcome, *(words.count(word) for word in ("passed", "failed", "skipped")), round(result.seconds, 1)


def _table(made: Page, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Without the columns in which nothing stands."""
    kept = [place for place in range(len(head)) if any(row[place] for row in rows)]
    made.table([head[place] for place in kept], [[row[place] for place in kept] for row in rows])


def _row(check: Check, part: str = "") -> tuple[Cell, ...]:
    why = ". Look at: ".join(filter(None, (check.reason, check.advice)))
    return part, check.name, Outcome(check.outcome), check.value, check.limit, why
