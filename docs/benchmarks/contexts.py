"""The cost of a token as its context grows: fits a line, prints a table, draws docs/benchmarks/contexts.png.

    python -m server.engine_bench MODEL --contexts 128,512,2048,8192 --sequences 1,4 --threads 2 --json > contexts.jsonl
    python docs/benchmarks/machine_limits.py >> contexts.jsonl
    python docs/benchmarks/contexts.py contexts.jsonl docs/benchmarks/contexts.png

The slope is held against the time that reading the keys and values of one more token takes at the machine's rate of
reading memory. Needs matplotlib (the extra `loadtest`).
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """step_ms = start_ms + slope_us / 1000 * (keys that a step reads, of all sequences)."""

    sequences: int
    start_ms: float
    slope_us: float
    limit_us: float
    """What reading one token's keys and values takes at least."""
    largest_error: float
    """Largest deviation of a measured step from the line, as a share of the step."""


def fit(rows: list[Row], bytes_per_second: float) -> Line:
    """Least squares through the steps of one number of sequences."""
    sequences = rows[0]["sequences"]
    keys, times = [sequences * row["context"] for row in rows], [row["step_ms"] for row in rows]
    slope, start = statistics.linear_regression(keys, times)
    return Line(
        sequences=sequences,
        start_ms=start,
        slope_us=slope * 1e3,
        limit_us=rows[0]["kv_token_bytes"] / bytes_per_second * 1e6,
        largest_error=max(abs(start + slope * k - t) / t for k, t in zip(keys, times, strict=True)),
    )


def table(lines: list[Line]) -> str:
    """Markdown."""
    header = "| sequences | no context, ms | us per token of context | reading it, us | ratio | largest error |"
    rows = [
        f"| {line.sequences} | {line.start_ms:.1f} | {line.slope_us:.2f} | {line.limit_us:.2f} "
        f"| {line.slope_us / line.limit_us:.2f} | {line.largest_error:.0%} |"
        for line in lines
    ]
    return "\n".join([header, "|---|---|---|---|---|---|", *rows])


def draw(groups: list[list[Row]], lines: list[Line], path: Path) -> None:
    """Measured steps as points, fits as lines, and the slope of the limit dashed."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (rows, line) in enumerate(zip(groups, lines, strict=True)):
        contexts = [row["context"] for row in rows]
        ends = [0, max(contexts)]
        per_token = line.sequences / 1e3
        name = f"{line.sequences} sequence{'s' if line.sequences > 1 else ''}"
        axes.plot(contexts, [row["step_ms"] for row in rows], "o", color=f"C{number}", label=name)
        axes.plot(ends, [line.start_ms + per_token * line.slope_us * end for end in ends], color=f"C{number}")
        axes.plot(ends, [line.start_ms + per_token * line.limit_us * end for end in ends], "--", color=f"C{number}")
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("decode step, ms (dashed: reading keys and values at the rate of memory)")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Read JSON lines, print the table, draw."""
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines() if line.startswith("{")]
    rate = next(row["read_gb_s"] for row in rows if row["engine"] == "machine") * 1e9
    steps = [row for row in rows if "context" in row]
    groups = [[row for row in steps if row["sequences"] == n] for n in sorted({row["sequences"] for row in steps})]
    lines = [fit(group, rate) for group in groups]
    print(table(lines))
    draw(groups, lines, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
