"""Runs the product over a reference's prompts, and says where the two differ. Called by `server/align/command.py`.

The product runs three times: as it serves, which gives the logits; operation by operation, which gives the error by
depth; and with every operation given the reference's input, which tells an operation that is wrong from one that
inherits an error.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from model_runtime.align.measure import Difference, LogitsDifference, Precisions, coarser, compare_logits, difference
from model_runtime.align.places import LOGITS, layer_of, named_parameters
from model_runtime.align.product import Product
from model_runtime.align.reference import Reference
from model_runtime.align.run import served, traced
from model_runtime.align.suspects.scene import Scene
from model_runtime.align.suspects.search import suspects
from model_runtime.align.tracer import Taken
from model_runtime.models.decoder import decoder_table
from model_runtime.weights.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceReport:
    """One place."""

    place: str
    layer: int | None
    kind: str
    operation: str
    own: Difference
    """Given the reference's input."""
    inherited: Difference | None
    """Given the product's; of the residual stream only."""
    limit: float
    """Of `own.max_rel`."""

    @property
    def diverges(self) -> bool:
        """By itself."""
        return not self.own.max_rel <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """The whole comparison."""

    places: tuple[PlaceReport, ...]
    """In the order in which the product computes."""
    logits: LogitsDifference
    logits_limit: float
    """Of `logits.max_rel`."""
    same_path: float
    """How far the logits of the product as it serves are from those operation by operation; compiled kernels give the
    same bits."""
    unobserved: tuple[str, ...]
    """Places of the reference that the product does not compute."""

    loss: LogitsDifference | None = None
    """What the product's integers lose against the floats that they were made of: for information."""
    suspects: tuple[str, ...] = ()
    """Why the first place diverges."""

    @property
    def first(self) -> PlaceReport | None:
        """The first place that diverges."""
        return next((place for place in self.places if place.diverges), None)

    @property
    def passed(self) -> bool:
        """Whether product and reference are the same but for rounding."""
        logits = self.logits
        is_near = logits.max_rel <= self.logits_limit and not logits.decided
        return self.first is None and is_near and self.same_path <= self.logits_limit


def align(ranks: Sequence[Product], reference: Reference) -> Alignment:
    """Compare the product, which `ranks` share, with the reference."""
    product = ranks[0]
    _check_quantization(reference, product.quantization)
    _check_width(reference, product.decoder.config.vocab_size)
    _check_length(reference, product.positions)
    served_LV = served(ranks, reference)
    traced_LV, free = traced(ranks, reference.stream(), forced=False)
    forced_LV, forced = traced(ranks, reference, forced=True)
    precisions = replace(product.precisions, hidden=coarser(product.precisions.hidden, reference.dtype))
    reports = [
        _report(name, taken, free[name].values if name in free else None, reference, precisions)
        for name, taken in sorted(forced.items(), key=lambda item: item[1].order)
    ]
    logits = Taken(kind="logits", operation="scale and cap of logits", values=forced_LV, order=len(reports))
    reports.append(_report(LOGITS, logits, served_LV, reference, precisions))
    limit = precisions.logits_limit(product.decoder.config.num_layers)
    found = Alignment(
        places=tuple(_with_unused(reports, product, reference)),
        logits=compare_logits(served_LV, reference.logits_LV, limit),
        logits_limit=limit,
        same_path=difference(traced_LV, served_LV).max_rel,
        unobserved=tuple(name for name in reference.places if name not in forced),
    )
    if reference.full_LV is not None:
        found = replace(found, loss=compare_logits(served_LV, reference.full_LV, limit))
    first = found.first
    return found if first is None else replace(found, suspects=_suspects(ranks, reference, first, forced))


def _suspects(
    ranks: Sequence[Product], reference: Reference, first: PlaceReport, taken: Mapping[str, Taken]
) -> tuple[str, ...]:
    product = ranks[0]
    if len(ranks) > 1:
        return ("with one rank align says why; where that passes, look at how this is divided among ranks",)
    layer = product.decoder.config.num_layers if first.layer is None else first.layer
    return suspects(
        Scene(product=product, reference=reference, place=first.place, layer=layer, taken=taken), first.kind
    )


def _with_unused(reports: list[PlaceReport], product: Product, reference: Reference) -> list[PlaceReport]:
    """With the norms whose weights the product holds and never applies, where the reference applies them."""
    decoder, known = product.decoder, {report.place for report in reports}
    names = named_parameters(decoder_table(decoder.config), decoder.share)
    if decoder.share.size > 1 and decoder.config.qk_norm == "row":
        return reports  # ranks sum squares, which is no operation of its own
    held = {f"{part.path}.out" for name in decoder.parameters.vectors if name in names for part in names[name].parts}
    order = [*reference.places, LOGITS]
    for place in sorted(held & set(reference.places) - known, key=order.index):
        later = set(order[order.index(place) :])
        at = next(index for index, report in enumerate(reports) if report.place in later)
        reports.insert(at, _unused(place, reports[at]))
    return reports


def _unused(place: str, following: PlaceReport) -> PlaceReport:
    kind = "qk_norm" if place.endswith(("q_norm.out", "k_norm.out")) else "norm"
    nothing = Difference(max_abs=math.inf, max_rel=math.inf, cosine=0.0)
    operation = f"{kind} that the product never computes, though it has its weight"
    return replace(
        following, place=place, layer=layer_of(place), kind=kind, operation=operation, own=nothing, inherited=nothing
    )


def _check_quantization(reference: Reference, asked: str) -> None:
    if reference.quantization != asked:
        raise CheckpointError(
            f"the reference is of --quantization {reference.quantization}, and the product is asked for {asked}"
        )


def _check_width(reference: Reference, vocab_size: int) -> None:
    if (found := reference.logits_LV.shape[1]) != vocab_size:
        raise CheckpointError(f"the reference has a vocabulary of {found} tokens, and the model one of {vocab_size}")


def _check_length(reference: Reference, positions: int) -> None:
    if (longest := max(map(len, reference.prompts))) > positions:
        raise CheckpointError(f"the reference has a prompt of {longest} tokens, and the product takes {positions}")


def _report(name: str, taken: Taken, free: Tensor | None, reference: Reference, precisions: Precisions) -> PlaceReport:
    expected = reference.logits_LV if name == LOGITS else reference.at(name)
    assert expected is not None, f"{name} was compared with nothing"
    return PlaceReport(
        place=name,
        layer=layer_of(name),
        kind=taken.kind,
        operation=taken.operation,
        own=difference(taken.values, expected),
        inherited=None if free is None else difference(free, expected),
        limit=precisions.limit(taken.kind),
    )
