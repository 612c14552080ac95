"""What the terminal shows: progress while it runs, tables at the end. Used by `loadtest/command.py`."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadtest.load import OnRecord
from loadtest.metrics import Spread
from loadtest.record import Record
from loadtest.runner import LevelResult

REFRESHES_PER_SECOND = 4
"""Drawing shares the processor with what is measured."""


class ShownProgress:
    """A line for the level that runs, on standard error; where that is no terminal, nothing until the level is over."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            disable=not console.is_terminal,
        )

    @contextmanager
    def level(self, title: str, total: int) -> Iterator[OnRecord]:
        """Yields what to call for each finished request."""
        with self._progress:
            task = self._progress.add_task(escape(title), total=total, figures="")
            failed = tokens = 0
            start = time.perf_counter()

            def on_record(record: Record) -> None:
                nonlocal failed, tokens
                failed, tokens = failed + bool(record.error), tokens + record.num_output_tokens
                rate = tokens / (time.perf_counter() - start)
                self._progress.update(task, advance=1, figures=f"{rate:.0f} tokens/s, {failed} failed")

            yield on_record
            self._progress.remove_task(task)

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


Row = tuple[str, Callable[[LevelResult], float | None], str]


def _spread_rows(name: str, of: Callable[[LevelResult], Spread | None]) -> list[Row]:
    def value(result: LevelResult, percent: int) -> float | None:
        spread = of(result)
        if spread is None:
            return None
        return {50: spread.p50, 90: spread.p90, 99: spread.p99}[percent]

    return [
        (f"{name} p50, ms", lambda result: value(result, 50), ",.1f"),
        (f"{name} p90, ms", lambda result: value(result, 90), ",.1f"),
        (f"{name} p99, ms", lambda result: value(result, 99), ",.1f"),
    ]


ROWS: tuple[Row, ...] = (
    ("requests/s", lambda result: result.metrics.requests_per_second, ".2f"),
    ("output tokens/s", lambda result: result.metrics.output_tokens_per_second, ",.1f"),
    ("all tokens/s", lambda result: result.metrics.total_tokens_per_second, ",.1f"),
    *_spread_rows("TTFT", lambda result: result.metrics.ttft_ms),
    *_spread_rows("TPOT", lambda result: result.metrics.tpot_ms),
    *_spread_rows("ITL", lambda result: result.metrics.itl_ms),
    *_spread_rows("E2E", lambda result: result.metrics.e2e_ms),
    ("goodput, requests/s", lambda result: result.metrics.goodput, ".2f"),
    ("met the objectives", lambda result: result.metrics.good_share, ".1%"),
    ("succeeded", lambda result: result.metrics.succeeded, ","),
    ("failed", lambda result: result.metrics.requests - result.metrics.succeeded, ","),
    ("input tokens a request", lambda result: result.metrics.mean_input_tokens, ",.1f"),
    ("output tokens a request", lambda result: result.metrics.mean_output_tokens, ",.1f"),
    ("cached input", lambda result: result.metrics.cached_share, ".1%"),
    ("server CPU, cores", lambda result: result.server_cores, ".2f"),
    ("client CPU, cores", lambda result: result.client.cores, ".2f"),
    ("client lag p99, ms", lambda result: result.client.lag_p99_ms, ".1f"),
)
"""Name, value, and how it is written."""
RATIO_ROWS = 15
"""The first rows are the ones where a ratio between two servers says something."""


def cells(result: LevelResult) -> list[str]:
    """The figures of a result as text, one for each of `ROWS`; '-' where there is none."""
    return [_cell(of(result), form) for _, of, form in ROWS]


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def ratios(result: LevelResult, first: LevelResult) -> list[str]:
    """The figures over those of the first server, for the rows where that makes sense."""
    texts = []
    for _, of, _ in ROWS[:RATIO_ROWS]:
        value, base = of(result), of(first)
        texts.append(f"{value / base:.2f}x" if value is not None and base else "-")
    return texts + [""] * (len(ROWS) - RATIO_ROWS)


def print_results(console: Console, results: Sequence[LevelResult]) -> None:
    """One table of all levels for one server; one table a level for several."""
    if len({result.server for result in results}) == 1:
        _print_table(console, "", [(result.level.label, cells(result)) for result in results])
    else:
        for level in dict.fromkeys(result.level for result in results):
            first, *others = [result for result in results if result.level == level]
            columns = [(first.server, cells(first))]
            for other in others:
                columns += [(other.server, cells(other)), (f"/ {first.server}", ratios(other, first))]
            _print_table(console, level.label, columns)
    for result in results:
        _print_remarks(console, result)


def _print_table(console: Console, title: str, columns: Sequence[tuple[str, list[str]]]) -> None:
    table = Table("", title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name, _ in columns:
        table.add_column(escape(name), justify="right", overflow="fold")
    for index, (name, _, _) in enumerate(ROWS):
        values = [column[index] for _, column in columns]
        if set(values) != {"-"}:
            table.add_row(name, *values)
    console.print(table, highlight=False)


def _print_remarks(console: Console, result: LevelResult) -> None:
    where = f"{result.server}, {result.level.label}: "
    for kind, number in result.metrics.errors.items():
        example = result.metrics.error_examples[kind]
        console.print(
            f"{where}{number} x {kind}: {example}", style="red", highlight=False, markup=False, soft_wrap=True
        )
    for warning in result.warnings:
        console.print(where + warning, style="yellow", highlight=False, markup=False, soft_wrap=True)
