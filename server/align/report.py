"""What `firstlight align` found, for people in the terminal and as a page, and for programs as JSON."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from server.report.axis import Axis
from server.report.page import Cell, Outcome, Page
from server.report.plot import Limit, Plot, Series

if TYPE_CHECKING:
    from model_runtime.align.compare import Alignment, PlaceReport
    from model_runtime.align.measure import LogitsDifference

HEAD = ("place", "operation", "max abs", "max rel", "cosine", "allowed")
WIDTH = 100
"""Of what is not a terminal."""
MEANING = (
    "Each operation is given the reference's input here, so its error is its own. max rel is the largest difference of "
    "a number, relative to it or to its row's size, whichever is more."
)


def verdict(found: "Alignment") -> str:
    """In a sentence."""
    first, logits = found.first, found.logits
    if first is not None:
        return (
            f"{first.place} ({first.kind}: {first.operation}) is the first place that diverges: max rel "
            f"{first.own.max_rel:.2g}, {first.limit:.2g} is allowed"
        )
    if logits.decided:
        return f"no operation diverges, and {logits.decided} tokens get another most likely next token all the same"
    if not logits.max_rel <= found.logits_limit:
        return (
            f"no operation diverges, and the logits differ by {logits.max_rel:.2g} relative, {found.logits_limit:.2g} "
            "is allowed: each operation's error is small, and they add up"
        )
    if not found.same_path <= found.logits_limit:
        return (
            f"operation by operation the product is right, and its layers in one call differ from that by "
            f"{found.same_path:.2g}: it is the compiled program that is wrong"
        )
    return "product and reference are the same but for rounding"


def worst_by_kind(found: "Alignment") -> list["PlaceReport"]:
    """Of each kind of operation the place with the largest error of its own, in the order in which kinds come."""
    worst: dict[str, PlaceReport] = {}
    for place in found.places:
        known = worst.get(place.kind)
        if known is None or not place.own.max_rel <= known.own.max_rel:
            worst[place.kind] = place
    return list(worst.values())


def logits_line(found: "Alignment") -> str:
    """The logits of the product as it serves."""
    logits = found.logits
    return (
        f"logits: max abs {logits.max_abs:.2g}, max rel {logits.max_rel:.2g} ({found.logits_limit:.2g} allowed), "
        f"KL mean {logits.mean_kl:.2g} and max {logits.max_kl:.2g} nats, top-1 agreement {logits.agreement:.2%}"
    )


def _loss_line(loss: "LogitsDifference") -> str:
    return (
        f"what quantisation loses, for information: KL from the unquantised model mean {loss.mean_kl:.2g} and max "
        f"{loss.max_kl:.2g} nats, top-1 agreement {loss.agreement:.2%}"
    )


def _row(place: "PlaceReport") -> tuple[str, ...]:
    own = place.own
    numbers = (f"{own.max_abs:.1e}", f"{own.max_rel:.1e}", f"{own.cosine:.7f}", f"{place.limit:.1e}")
    return (place.place, place.operation, *numbers)


def show(found: "Alignment", title: str, computes: str) -> None:
    """In the terminal: of each kind of operation the worst place."""
    console = Console(emoji=False, highlight=False)
    if not console.is_terminal:
        console = Console(emoji=False, highlight=False, width=WIDTH)
    console.print(f"{title}, product with {computes}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("kind", "worst place", *HEAD[2:]):
        table.add_column(name, no_wrap=True)
    for place in worst_by_kind(found):
        shown, _, *numbers = _row(place)
        table.add_row(place.kind, shown, *numbers, style="red" if place.diverges else None)
    console.print(table)
    console.print(logits_line(found), markup=False, soft_wrap=True)
    if found.loss is not None:
        console.print(_loss_line(found.loss), markup=False, soft_wrap=True)
    if found.unobserved:
        console.print(f"not compared, since the product has no such place: {_listed(found.unobserved)}", markup=False)
    for suspect in found.suspects:
        console.print(f"why: {suspect}", markup=False, soft_wrap=True)
    word = "PASSED" if found.passed else "FAILED"
    console.print(f"{word}: {verdict(found)}", markup=False, soft_wrap=True)


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def as_json(found: "Alignment", title: str) -> Mapping[str, object]:
    """Everything."""
    return {
        "title": title,
        "passed": found.passed,
        "verdict": verdict(found),
        "first": None if found.first is None else found.first.place,
        **asdict(found),
    }


def page(found: "Alignment", title: str, computes: str) -> Page:
    """Everything, with the error by depth."""
    made = Page(title, f"firstlight align, product with {computes}")
    made.verdict(found.passed, verdict(found))
    for suspect in found.suspects:
        made.text(f"Why: {suspect}.")
    made.text(logits_line(found) + ".")
    if found.loss is not None:
        made.text(_loss_line(found.loss) + ".")
    made.plots(_plots(found))
    made.heading("Worst place of each kind of operation")
    made.table(("kind", *HEAD, ""), [(place.kind, *_cells(place)) for place in worst_by_kind(found)])
    made.heading("All places, in the order in which they are computed")
    made.text(MEANING)
    made.table((*HEAD, ""), [_cells(place) for place in found.places])
    if found.unobserved:
        made.text(f"Not compared, since the product has no such place: {', '.join(found.unobserved)}.")
    return made


def _cells(place: "PlaceReport") -> tuple[Cell, ...]:
    return (*_row(place), Outcome("failed" if place.diverges else "passed"))


def _plots(found: "Alignment") -> list[Plot]:
    own = [(float(index), place.own.max_rel) for index, place in enumerate(found.places)]
    limits = [(float(index), place.limit) for index, place in enumerate(found.places)]
    stream = [(place, place.inherited) for place in found.places if place.place.endswith(".out")]
    depth = [(float(place.layer or 0), own.max_rel) for place, own in stream if own is not None]
    errors = Axis(label="max rel", base=10)
    first = next((index for index, place in enumerate(found.places) if place.diverges), None)
    mark = [] if first is None else [Limit(at=float(first), text=found.places[first].place, upright=True)]
    return [
        Plot(
            title="Error by depth: the residual stream behind each layer, given the product's own input",
            x=Axis(label="layer"),
            y=errors,
            series=[Series(name="max rel", points=depth)],
        ),
        Plot(
            title="Error of each place, given the reference's input",
            x=Axis(label="place, in order"),
            y=errors,
            series=[Series(name="max rel", points=own), Series(name="allowed", points=limits, dashed=True)],
            limits=mark,
        ),
    ]
