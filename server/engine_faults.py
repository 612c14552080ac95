"""The engine's loop with faults at named points (`faults.py`); engine process, and only with --fault-hooks.

`take`: the request arrives. `plan`, `execute`, `commit`, `publish`: the next time that the loop comes there with the
request accepted. What `corrupt` spoils: at `logits` a row of the request, at `features` how many embeddings its images
are said to have, at `frame` the message of its first events.
"""

from array import array
from dataclasses import replace
from math import nan

from scheduler.plan import SampleRows, StepPlan, StepResult, floats, ints
from scheduler.request import Request
from server.engine import EngineLoop
from server.faults import Fault, fault_of

NONSENSE = b"\xc1 no message"


class FaultyLoop(EngineLoop):
    """An EngineLoop in which requests may have a fault."""

    _armed: "tuple[Fault, Request] | None" = None
    """The newest request with a fault that has not happened."""

    def _accept(self, request: Request) -> None:
        fault = fault_of(request.cache_salt)
        if fault is not None:
            self._armed = fault, request
            self._reach("take")
        super()._accept(request)

    def _reach(self, point: str) -> bool:
        """Whether something is to be corrupted here; other faults happen."""
        if self._armed is None or self._armed[0].point != point:
            return False
        (fault, _), self._armed = self._armed, None
        fault.happen()
        return fault.action == "corrupt"

    def _plan(self) -> StepPlan | None:
        self._reach("plan")
        return super()._plan()

    def _begin(self, plan: StepPlan) -> None:
        self._reach("execute")
        if self._armed is not None:
            request = self._armed[1]
            if request.sampling.seed in plan.sample.seed and self._reach("logits"):
                plan = replace(plan, sample=with_nan(plan.sample, request.sampling.seed))
            if plan.encode.slots and self._reach("features"):
                plan = replace(plan, encode=replace(plan.encode, num_embeddings=too_many(plan, request)))
        super()._begin(plan)

    def _commit(self, result: StepResult) -> None:
        self._reach("commit")
        super()._commit(result)

    def _publish(self) -> None:
        self._reach("publish")
        if self._reach("frame"):
            self._socket.send(NONSENSE)
        super()._publish()


def with_nan(rows: SampleRows, seed: int) -> SampleRows:
    """The rows, of which those of a sequence get a bias that is not a number."""
    ids, values, offsets = ints(), floats(), ints([0])
    for row, other in enumerate(rows.seed):
        own = slice(rows.bias_offsets[row], rows.bias_offsets[row + 1])
        ids += rows.bias_ids[own]
        values += rows.bias_values[own]
        if other == seed:
            ids.append(0)
            values.append(nan)
        offsets.append(len(ids))
    return replace(rows, bias_ids=ids, bias_values=values, bias_offsets=offsets)


def too_many(plan: StepPlan, request: Request) -> "array[int]":
    """The counts of embeddings of a plan, of which those of the request's images are one too high."""
    own = [image.pixels.data for image in request.images.images if image.pixels is not None]
    counts = zip(plan.encode.num_embeddings, plan.encode.pixels, strict=True)
    return ints([count + (pixels.data in own) for count, pixels in counts])
