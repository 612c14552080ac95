"""The writer of reports: pages that need nothing else, and plots whose points are where their numbers say."""

import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from server.report.axis import Axis, scale_of, short
from server.report.page import Outcome, Page, number
from server.report.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Limit, Plot, Series, figure


def drawn(plot: Plot) -> list[ElementTree.Element]:
    """The elements of a plot, which is well-formed XML."""
    return list(ElementTree.fromstring(figure(plot)).iter())


def test_points_lie_where_their_numbers_say() -> None:
    plot = Plot(
        title="T",
        x=Axis(label="tokens", base=2),
        y=Axis(label="s", from_zero=True),
        series=[Series(name="p50", points=[(1, 0), (4, 20), (16, 100)])],
    )
    circles = [element for element in drawn(plot) if element.tag == "circle"]
    places = [(float(circle.get("cx", "")), float(circle.get("cy", ""))) for circle in circles]
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    fifth = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) / 5
    assert places == [(LEFT, HEIGHT - BOTTOM), (middle, fifth), (WIDTH - RIGHT, TOP)]
    assert [circle[0].text for circle in circles] == ["p50: 1, 0", "p50: 4, 20", "p50: 16, 100"]
    ticks = [element.text for element in drawn(plot) if element.tag == "text"]
    assert ticks == ["0", "20", "40", "60", "80", "100", "1", "2", "4", "8", "16", "s", "tokens"]


def test_what_cannot_be_drawn_interrupts_the_line_and_is_counted() -> None:
    points = [(0, 1e-3), (1, math.nan), (2, 0.0), (3, 1e-6)]
    plot = Plot(
        title="T",
        x=Axis(label="layer"),
        y=Axis(label="error", base=10),
        series=[Series(name="a", points=points)],
        limits=[Limit(at=1e-4, text="limit"), Limit(at=2, text="first", upright=True)],
    )
    elements = drawn(plot)
    curve = next(element.get("d", "") for element in elements if element.get("class") == "curve")
    assert curve.count("M") == 2 and curve.count("L") == 1
    lowest = [element.get("cy") for element in elements if element.tag == "circle"][1]
    assert lowest == f"{HEIGHT - BOTTOM:.1f}"
    words = "".join(element.text or "" for element in elements if element.tag == "figcaption")
    assert words == "1 values are not finite and not drawn. Values of 0 are drawn at the lower edge."
    assert sum(element.get("class") == "limit" for element in elements) == 2


def test_a_long_series_is_a_line_whose_numbers_can_still_be_asked_for() -> None:
    series = [Series(name="rss", points=[(second, second) for second in range(1000)])]
    elements = drawn(Plot(title="T", x=Axis(label="s"), y=Axis(label="bytes"), series=series))
    circles = [element for element in elements if element.tag == "circle"]
    assert len(circles) == 77 and circles[0].get("style") == "fill:transparent"


@pytest.mark.parametrize(
    ("axis", "values", "ticks"),
    [
        (Axis(label=""), [0.0, 1.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (Axis(label=""), [301.0, 309.0], [300, 302, 304, 306, 308, 310]),
        (Axis(label=""), [7.0], [0, 2, 4, 6, 8]),
        (Axis(label=""), [], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (Axis(label="", base=10), [3.0, 70.0], [1, 2, 5, 10, 20, 50, 100]),
        (Axis(label="", base=10), [1e-9, 1.0], [1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1]),
        (Axis(label="", base=2), [], [1, 2]),
        (Axis(label="", base=2), [8.0], [8, 16]),
    ],
)
def test_ticks(axis: Axis, values: list[float], ticks: list[float]) -> None:
    scale = scale_of(axis, values)
    assert scale.ticks == pytest.approx(ticks)
    assert all(0 <= scale.fraction(value) <= 1 for value in values)


def test_short_numbers() -> None:
    values = [0, 0.25, 1e-5, 2.5e-7, 1024, 4096, 131072, 2**20, 20_000, 3.25e9, math.inf]
    assert [short(value) for value in values] == [
        *("0", "0.25", "1e-5", "2.5e-7", "1024", "4Ki", "128Ki", "1Mi", "20k", "3.25G", "inf")
    ]
    assert [number(value) for value in (None, 3, 0.123456, 123456.7, math.nan)] == ["–", "3", "0.1235", "123457", "nan"]


def test_a_page_is_whole_and_escapes_what_others_wrote(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>&"
    page = Page(evil, evil)
    page.verdict(False, evil)
    page.heading(evil)
    page.text(evil)
    page.table(("check", "outcome", evil), [(evil, Outcome("failed"), 1.5), ("b", Outcome("passed"), None)])
    page.plots([Plot(title=evil, x=Axis(label=evil), y=Axis(label=evil), series=[Series(name=evil, points=[(0, 1)])])])
    page.verbatim(evil)
    page.folded(evil, evil)
    page.write(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script" not in text and text.count("&lt;script&gt;") >= 12
    assert re.findall(r"(?:src|href|url)\s*[=(]", text) == []
    assert '<td class="failed">FAILED</td><td class="n">1.5</td>' in text
    assert '<p class="verdict failed" role="status">Failed: ' in text
