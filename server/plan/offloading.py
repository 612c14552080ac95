"""The way that fits once layers are left in host memory, where nothing fits on a device alone. Called by `show.py`.

Such a way is slower by far than one on the device, so it is named and not recommended: a smaller model, fewer sequences
or another device may be the better answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from model_runtime.memory.offload import ways
from model_runtime.memory.planning import Outline
from server.plan.candidates import Asked, Candidate, Fit, again
from server.plan.choice import recommended
from server.plan.devices import Devices


def with_offload(model: Outline, devices: Devices, asked: Asked, found: Sequence[Candidate]) -> Candidate | None:
    """What leaves least in host memory; None where something fits without, or nothing does."""
    if devices.kind == "cpu" or asked.runtime.offload_weights or recommended(found, devices, asked) is not None:
        return None
    least = min(_fitting(model, devices, asked, found), key=lambda way: way[0], default=None)
    return None if least is None else least[1]


def _fitting(
    model: Outline, devices: Devices, asked: Asked, found: Sequence[Candidate]
) -> Iterator[tuple[int, Candidate]]:
    """With the bytes that each leaves there."""
    for candidate in found:
        if candidate.refused or candidate.fit is None:
            continue
        missing = _missing(candidate.fit)
        sizes = (way.host_bytes for way in ways(candidate.fit.fullest.weights.layers) if way.saved_bytes >= missing)
        if (least := next(sizes, None)) is None:
            continue
        more = replace(asked, runtime=replace(asked.runtime, offload_weights=least))
        if (changed := again(model, devices, more, candidate)).fits:
            yield least, changed


def _missing(fit: Fit) -> int:
    """Bytes that the fullest rank has too little for all sequences."""
    needs = fit.fullest
    blocks = fit.scheduler.max_num_seqs * -(-fit.length // needs.block_tokens) + needs.spare_blocks
    return fit.without_kv(needs) + blocks * needs.block_bytes - fit.budget
