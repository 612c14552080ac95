"""Which of the ways to serve a model is the best, and which to show. Called by `show.py` and `command.py`."""

from collections.abc import Sequence

from server.plan.candidates import PRECISIONS, Asked, Candidate
from server.plan.devices import Devices
from server.plan.roofline import rates


def _loss(candidate: Candidate) -> int:
    """How much its precision loses, less first."""
    pair = candidate.quantization, candidate.kv_type
    return PRECISIONS.index(pair) if pair in PRECISIONS else len(PRECISIONS)


def _preference(candidate: Candidate, devices: Devices, asked: Asked) -> tuple[float, ...]:
    """Less is better: what loses less, then what writes faster; where that is not known, on GPUs what uses more of
    them, and then the simpler: fewer ranks of a replica, which share layers before they share anything else."""
    split, speed = candidate.split, rates(candidate, devices, asked.concurrency)
    used = 0 if devices.kind == "cpu" else -split.devices
    simple = (used, split.devices // split.replicas, split.devices, split.stages, split.context, split.whole_experts)
    return (_loss(candidate), 0.0 if speed is None else -speed.decode, *simple)


def recommended(found: Sequence[Candidate], devices: Devices, asked: Asked) -> Candidate | None:
    """The best of those that fit and that serve accepts."""
    good = [candidate for candidate in found if candidate.fits and not candidate.refused]
    return min(good, key=lambda candidate: _preference(candidate, devices, asked), default=None)


def _distance(candidate: Candidate) -> tuple[float, ...]:
    """How far from a recommendation: not accepted, not for all sequences, for none."""
    fit = candidate.fit
    assert fit is not None, "the distance of what cannot be"
    needs = fit.fullest
    missing = max(0, fit.without_kv(needs) + fit.kv(needs) - fit.budget)
    kept = fit.sequences * candidate.split.replicas
    return (fit.pool is None, missing, not candidate.fits, bool(candidate.refused), -kept, _loss(candidate))


def nearest(found: Sequence[Candidate]) -> Candidate | None:
    """What comes closest where nothing is recommended; None where nothing can be divided."""
    return min((candidate for candidate in found if candidate.fit is not None), key=_distance, default=None)


def shortest(found: Sequence[Candidate], devices: Devices, asked: Asked) -> list[Candidate]:
    """Of each layout the first precision that fits, or what comes closest; best layouts first."""
    by_split: dict[str, list[Candidate]] = {}
    for candidate in found:
        by_split.setdefault(str(candidate.split), []).append(candidate)
    kept = []
    for ways in by_split.values():
        fitting = [candidate for candidate in ways if candidate.fits]
        kept.append(min(fitting, key=_loss) if fitting else nearest(ways) or ways[0])

    def order(candidate: Candidate) -> tuple[float, ...]:
        is_there = candidate.fit is not None
        return (
            not (candidate.fits and not candidate.refused),
            not candidate.fits,
            not is_there,
            *(_distance(candidate)[:2] if is_there else (0.0, 0.0)),
            *_preference(candidate, devices, asked),
        )

    return sorted(kept, key=order)
