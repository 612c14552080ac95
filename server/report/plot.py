"""A line plot as inline SVG: axes, ticks, grid, legend, and limits as dashed lines. Pure; used by `page.py`.

Every point tells its numbers when pointed at (a `title`), so no script is needed. A series is told from others by its
colour, and from the seventh on by its dashes too.
"""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from server.report.axis import Axis, Scale, finite, scale_of, short

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 24, 18, 44
COLOURS = 6
DASHES = ("", "7 4", "2 3")
MAX_MARKERS = 80
"""A series of more points than this is a line alone; its numbers are shown at so many of them."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line. A point whose value is not finite interrupts it, and is counted below the plot."""

    name: str
    points: Sequence[Point]
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A dashed line across the plot with a word at it: at a height, or where `upright` at a place of the other axis."""

    at: float
    text: str
    upright: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What is drawn. `note` stands below."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    limits: Sequence[Limit] = ()
    note: str = ""


def figure(plot: Plot) -> str:
    """The plot as an HTML figure with title and legend."""
    lost = sum(len(series.points) - len(list(finite(series.points))) for series in plot.series)
    notes = [plot.note, f"{lost} values are not finite and not drawn." if lost else ""]
    if plot.y.base and any(value <= 0 for series in plot.series for _, value in finite(series.points)):
        notes.append("Values of 0 are drawn at the lower edge.")
    note = " ".join(filter(None, notes))
    below = f"<figcaption>{html.escape(note)}</figcaption>" if note else ""
    legend = "".join(_key(index, series) for index, series in enumerate(plot.series)) if len(plot.series) > 1 else ""
    head = f"<figcaption><b>{html.escape(plot.title)}</b><br/>{legend}</figcaption>"
    return f"<figure>{head}{_drawing(plot)}{below}</figure>"


def _line_style(index: int, series: Series) -> str:
    dash = DASHES[(index // COLOURS + series.dashed) % len(DASHES)]
    return f'style="stroke:var(--c{index % COLOURS})"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _key(index: int, series: Series) -> str:
    line = f'<path class="curve" d="M0 5h22" {_line_style(index, series)}/>'
    return f'<span class="key"><svg width="22" height="10">{line}</svg>{html.escape(series.name)}</span>'


def _drawing(plot: Plot) -> str:
    points = [point for series in plot.series for point in finite(series.points)]
    upright, level = ([limit.at for limit in plot.limits if limit.upright is value] for value in (True, False))
    x_scale = scale_of(plot.x, [x for x, _ in points] + upright)
    y_scale = scale_of(plot.y, [y for _, y in points] + level)
    parts = [*_axes(plot, x_scale, y_scale)]
    for index, series in enumerate(plot.series):
        parts += _curve(index, series, x_scale, y_scale)
    parts += [part for limit in plot.limits for part in _limit(limit, x_scale, y_scale)]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" aria-label="{html.escape(plot.title)}">'
        + "".join(parts)
        + "</svg>"
    )


def _across(scale: Scale, value: float) -> float:
    return LEFT + scale.fraction(value) * (WIDTH - LEFT - RIGHT)


def _up(scale: Scale, value: float) -> float:
    return HEIGHT - BOTTOM - scale.fraction(value) * (HEIGHT - TOP - BOTTOM)


def _axes(plot: Plot, x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for tick in y_scale.ticks:
        y = _up(y_scale, tick)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>'
    for tick in x_scale.ticks:
        x = _across(x_scale, tick)
        yield f'<path class="grid" d="M{x:.1f} {bottom}v5"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{short(tick)}</text>'
    yield f'<text x="{LEFT}" y="11">{html.escape(plot.y.label)}</text>'
    yield f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">{html.escape(plot.x.label)}</text>'


def _limit(limit: Limit, x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    text = html.escape(limit.text)
    if limit.upright:
        x = _across(x_scale, limit.at)
        is_left = x < (LEFT + WIDTH - RIGHT) / 2
        yield f'<path class="limit" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
        anchor = "start" if is_left else "end"
        yield f'<text x="{x + (5 if is_left else -5):.1f}" y="{TOP + 12}" text-anchor="{anchor}">{text}</text>'
        return
    y = _up(y_scale, limit.at)
    yield f'<path class="limit" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
    yield f'<text x="{WIDTH - RIGHT}" y="{y - 4:.1f}" text-anchor="end">{text}</text>'


def _curve(index: int, series: Series, x_scale: Scale, y_scale: Scale) -> Iterator[str]:
    path, pen_down = "", False
    for x, y in series.points:
        is_drawn = math.isfinite(x) and math.isfinite(y)
        if is_drawn:
            path += f"{'L' if pen_down else 'M'}{_across(x_scale, x):.1f} {_up(y_scale, y):.1f}"
        pen_down = is_drawn
    if path:
        yield f'<path class="curve" d="{path}" {_line_style(index, series)}/>'
    shown = list(finite(series.points))
    is_marked = len(shown) <= MAX_MARKERS
    radius, fill = (3.5, f"var(--c{index % COLOURS})") if is_marked else (6, "transparent")
    for x, y in shown[:: -(-len(shown) // MAX_MARKERS) or 1]:
        name = html.escape(f"{series.name}: {short(x)}, {y:.6g}")
        yield (
            f'<circle cx="{_across(x_scale, x):.1f}" cy="{_up(y_scale, y):.1f}" r="{radius}" style="fill:{fill}">'
            f"<title>{name}</title></circle>"
        )
