"""A report: headings, text, tables, plots and a verdict, added one after the other and written as one HTML page.

All text is escaped here. Used by the commands that check a model.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from server.report.plot import Plot, figure
from server.report.style import STYLE


@dataclass(frozen=True, slots=True)
class Outcome:
    """A cell of a table that says how a check ended."""

    word: Literal["passed", "failed", "skipped"]


Cell = str | int | float | Outcome | None


class Page:
    """Collects the parts of a report in the order in which they are read."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._parts = [f"<h1>{html.escape(title)}</h1>"]
        if subtitle:
            self._parts.append(f'<p class="dim">{html.escape(subtitle)}</p>')

    def verdict(self, passed: bool, text: str) -> None:
        """What it all comes to, in a sentence."""
        word = "passed" if passed else "failed"
        shown = html.escape(text)
        self._parts.append(f'<p class="verdict {word}" role="status">{word.capitalize()}: {shown}</p>')

    def heading(self, text: str) -> None:
        """The next part of the report begins."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        """A paragraph."""
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Rows as wide as `head`. Numbers stand to the right; None is a dash."""
        names = "".join(
            f"<th{_class(_is_number_column(rows, place))}>{html.escape(name)}</th>" for place, name in enumerate(head)
        )
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
        self._parts.append(f'<div class="wide"><table><tr>{names}</tr>{body}</table></div>')

    def plots(self, plots: Sequence[Plot]) -> None:
        """Side by side where there is room."""
        self._parts.append(f'<div class="plots">{"".join(map(figure, plots))}</div>')

    def verbatim(self, text: str) -> None:
        """A command or a log, as it is."""
        self._parts.append(f"<pre>{html.escape(text)}</pre>")

    def folded(self, title: str, text: str) -> None:
        """Text that few will read, behind a line to click on."""
        self._parts.append(f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>")

    def html(self) -> str:
        """The whole page."""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{html.escape(self._title)}</title><style>{STYLE}</style></head>\n<body>"
            + "\n".join(self._parts)
            + "\n</body></html>\n"
        )

    def write(self, path: Path) -> None:
        """Raises OSError."""
        path.write_text(self.html(), encoding="utf-8")


def _is_number_column(rows: Sequence[Sequence[Cell]], place: int) -> bool:
    return any(isinstance(row[place], int | float) for row in rows)


def _class(is_number: bool) -> str:
    return ' class="n"' if is_number else ""


def _cell(value: Cell) -> str:
    if isinstance(value, Outcome):
        shown = value.word.upper() if value.word == "failed" else value.word
        return f'<td class="{value.word}">{shown}</td>'
    if isinstance(value, str):
        return f"<td>{html.escape(value)}</td>"
    return f'<td class="n">{number(value)}</td>'


def number(value: float | None) -> str:
    """Four digits of a number; whole ones as they are, and a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if not math.isfinite(value) or abs(value) < 1e4 else f"{value:.0f}"
