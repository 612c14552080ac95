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


def _order(candidate: Candidate, devices: Devices, asked: Asked) -> tuple[float, ...]:
    """What is accepted and fits first, then what fits, then what holds some sequences, then what misses least."""
    fit = candidate.fit
    if fit is None:
        return (3,)
    needs = fit.fullest
    missing = max(0, fit.without_kv(needs) + fit.kv(needs) - fit.budget) if fit.pool is None else 0
    kept = 0 if candidate.fits else fit.sequences * candidate.split.replicas
    rank = 0 if candidate.fits and not candidate.refused else 1 if candidate.fits else 2
    return (rank, missing, -kept, bool(candidate.refused), *_preference(candidate, devices, asked))


def nearest(found: Sequence[Candidate], devices: Devices, asked: Asked) -> Candidate | None:
    """What comes closest where nothing is recommended; None where nothing can be divided."""
    ways = [candidate for candidate in found if candidate.fit is not None]
    return min(ways, key=lambda candidate: _order(candidate, devices, asked), default=None)


def shortest(found: Sequence[Candidate], devices: Devices, asked: Asked) -> list[Candidate]:
    """Of each layout the first precision that fits, or what comes closest; best layouts first."""
    by_split: dict[str, list[Candidate]] = {}
    for candidate in found:
        by_split.setdefault(str(candidate.split), []).append(candidate)
    kept = []
    for ways in by_split.values():
        fitting = [candidate for candidate in ways if candidate.fits]
        kept.append(min(fitting, key=_loss) if fitting else nearest(ways, devices, asked) or ways[0])
    return sorted(kept, key=lambda candidate: _order(candidate, devices, asked))
