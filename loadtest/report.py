"""Draws the curves of a run over its levels, as a PNG or as a page with the table below. Used by `loadtest/command.py`.

Needs matplotlib, which only the extra `loadtest` brings; imported when a report is asked for.
"""

import html
import importlib.util
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.display import ROWS, cells
from loadtest.metrics import Spread
from loadtest.runner import LevelResult
from loadtest.settings import LoadTestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Value = Callable[[LevelResult], float | None]
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "svg{max-width:100%;height:auto}"
    "table{border-collapse:collapse}td,th{padding:.15rem .8rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#f4f4f4}pre{white-space:pre-wrap}"
)


def check_available() -> None:
    """Before anything is measured. Raises LoadTestError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise LoadTestError(
            "--report draws with matplotlib, which is not installed: pip install 'firstlight[loadtest]'"
        )


def write(path: Path, results: Sequence[LevelResult], conditions: dict[str, Any]) -> None:
    """Draw to `path`; its ending says which of the two kinds."""
    drawn = io.BytesIO()
    figure(results).savefig(drawn, format="png" if path.suffix == ".png" else "svg", dpi=120)
    content = drawn.getvalue()
    if path.suffix == ".html":
        content = page(content.decode(), results, conditions).encode()
    path.write_bytes(content)


def figure(results: Sequence[LevelResult]) -> "Figure":
    """Six panels; a line for each server, p50 solid and p99 dashed."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(13, 7.5), layout="constrained")
    axes = drawn.subplots(2, 3).flat
    _panel(next(axes), results, "output tokens/s", lambda result: result.metrics.output_tokens_per_second, None)
    _panel(next(axes), results, "requests/s (dashed: goodput)", _requests, lambda result: result.metrics.goodput)
    panels: tuple[tuple[str, Callable[[LevelResult], Spread | None]], ...] = (
        ("TTFT, ms", lambda result: result.metrics.ttft_ms),
        ("TPOT, ms", lambda result: result.metrics.tpot_ms),
        ("ITL, ms", lambda result: result.metrics.itl_ms),
        ("E2E, ms", lambda result: result.metrics.e2e_ms),
    )
    for name, of in panels:
        _panel(next(axes), results, f"{name}: p50, p99 dashed", _percentile(of, 50), _percentile(of, 99))
    return drawn


def _requests(result: LevelResult) -> float:
    return result.metrics.requests_per_second


def _percentile(of: Callable[[LevelResult], Spread | None], percent: int) -> Value:
    def value(result: LevelResult) -> float | None:
        spread = of(result)
        if spread is None:
            return None
        return spread.p50 if percent == 50 else spread.p99

    return value


def _panel(axes: "Axes", results: Sequence[LevelResult], title: str, solid: Value, dashed: Value | None) -> None:
    for colour, server in zip(COLOURS * len(results), dict.fromkeys(result.server for result in results), strict=False):
        own = sorted((result for result in results if result.server == server), key=lambda result: result.level.amount)
        for of, style in ((solid, "-"), (dashed, "--")):
            points = [(result.level.amount, of(result)) for result in own] if of is not None else []
            shown = [(amount, value) for amount, value in points if value is not None]
            if shown:
                label = server if style == "-" else None
                axes.plot(*zip(*shown, strict=True), style, marker="o", markersize=4, color=colour, label=label)
    amounts = sorted({result.level.amount for result in results})
    if amounts[0] > 0:
        axes.set_xscale("log", base=2)
    axes.set_xticks(amounts, [f"{amount:g}" for amount in amounts])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    is_closed = results[0].level.concurrency is not None
    axes.set_xlabel("streams at a time" if is_closed else "requests a second")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


def page(svg: str, results: Sequence[LevelResult], conditions: dict[str, Any]) -> str:
    """A page that needs nothing else."""
    heads = "".join(f"<th>{html.escape(result.server)}<br>{html.escape(result.level.label)}</th>" for result in results)
    columns = [cells(result) for result in results]
    rows = []
    for index, (name, _, _) in enumerate(ROWS):
        values = "".join(f"<td>{column[index]}</td>" for column in columns)
        rows.append(f"<tr><td>{html.escape(name)}</td>{values}</tr>")
    remarks = [f"{result.server}, {result.level.label}: {text}" for result in results for text in result.warnings]
    listed = "".join(f"<li>{html.escape(remark)}</li>" for remark in remarks)
    settings = html.escape(json.dumps(conditions, indent=1, default=str))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Load test</title><style>{STYLE}</style>"
        f"<h1>Load test</h1><p>{html.escape(str(conditions['time']))}</p>{svg[svg.index('<svg') :]}"
        f"<ul>{listed}</ul><table><tr><th></th>{heads}</tr>{''.join(rows)}</table>"
        f"<h2>Conditions</h2><pre>{settings}</pre></html>\n"
    )
