"""Which waiting sequence goes to which engine, now. Pure; kept by `server/client.py`, API process.

Suspects (`replay.py`) are tried one after the other, on one engine, which begins with nobody else and gets nobody else
meanwhile; the contained go back to their replica; everybody else goes where `routing.py` says, and not
to an engine with sequences that have not proved innocent, if there is another. The choices of a request go together.
"""

from collections import Counter
from dataclasses import dataclass

from server.client_stream import ClientStream
from server.engine_link import NOWHERE
from server.generation import GenerationRequest
from server.replay import Live, LiveSequences
from server.routing import Router, prompt_blocks

EXPECTED_TOKENS = 256
"""That a sequence is expected to write from now on; most requests allow many more than they need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An engine that can be sent something."""

    replica: int
    engine: int
    """Its generation."""
    is_quiet: bool = False
    """Others are to be preferred."""
    adapts_images: bool = False
    """As in `RuntimeInfo`; alike for all."""


def work_of(live: Live) -> int:
    """The tokens that are to be computed for a sequence, as far as can be told."""
    has_begun = len(live.outputs) > 0 and live.lost_at is None
    known = 0 if has_begun else live.stream.prompt_tokens + len(live.outputs)
    wanted = 0 if live.request.pooling else live.request.sampling.max_tokens - len(live.outputs)
    return known + min(wanted, EXPECTED_TOKENS)


class Dispatcher:
    """For `sequences`; `by_prefix` where engines keep what prompts begin with, and there are several."""

    def __init__(self, sequences: LiveSequences, *, by_prefix: bool) -> None:
        self._sequences, self._by_prefix = sequences, by_prefix
        self._router = Router()
        self._trial = NOWHERE
        """The engine on which suspects are tried."""

    def due(self, places: list[Place], *, is_one_coming: bool) -> list[tuple[Live, Place]]:
        """Who is to be sent where; the caller does it at once. `is_one_coming` means an engine beside these."""
        suspects = self._sequences.suspects
        if not suspects:
            self._trial = NOWHERE
        waiting = [live for live in self._sequences if live.engine == NOWHERE]
        if not (waiting and places):
            return []
        found: list[tuple[Live, Place]] = []
        if suspects:
            trial = self._trial_place(suspects[0], places, is_one_coming)
            if trial is not None and all(live.engine == NOWHERE for live in suspects):
                found.append((suspects[0], trial))
            places = [place for place in places if place != trial]
        free = [live for live in waiting if live.points is None]
        return found + self._spread(free, places) if places else found

    def _trial_place(self, suspect: Live, places: list[Place], is_one_coming: bool) -> Place | None:
        """The one that was chosen, as long as it is there. Else that of the suspect's replica, or another one, without
        sequences; where none can be expected, the one with fewest."""
        if chosen := [place for place in places if place.engine == self._trial]:
            return chosen[0]
        counts = Counter(live.engine for live in self._sequences)
        best = min(places, key=lambda place: (counts[place.engine], place.replica != suspect.replica))
        is_own_there = any(place.replica == suspect.replica for place in places)
        if is_one_coming and (counts[best.engine] or not is_own_there):
            return None
        self._trial = best.engine
        return best

    def _spread(self, free: list[Live], places: list[Place]) -> list[tuple[Live, Place]]:
        """Everybody to one of these places, but for the contained whose replica is not among them."""
        loads = self._loads(places)
        by_replica = {place.replica: place for place in places}
        unproved = {live.engine for live in self._sequences if not live.is_proved}
        unproved |= {by_replica[live.replica].engine for live in free if live.replica in by_replica}
        together: dict[ClientStream, Place] = {}
        found = []
        for live in free:
            if live.replica is not None:
                place = by_replica.get(live.replica)
            elif (place := together.get(live.stream)) is None:
                place = together[live.stream] = self._route(live.request, places, loads, unproved)
            if place is not None:
                loads[place.engine] += work_of(live)
                found.append((live, place))
        return found

    def _loads(self, places: list[Place]) -> dict[int, int]:
        """By engine, in tokens."""
        loads = dict.fromkeys((place.engine for place in places), 0)
        for live in self._sequences if len(places) > 1 else ():
            if live.engine in loads:
                loads[live.engine] += work_of(live)
        return loads

    def _route(
        self, request: GenerationRequest, places: list[Place], loads: dict[int, int], unproved: set[int]
    ) -> Place:
        heard = [place for place in places if not place.is_quiet]
        good = [place for place in heard if place.engine not in unproved] or heard or places
        blocks = prompt_blocks(request, adapts_images=places[0].adapts_images) if self._by_prefix else []
        engine = self._router.choose(blocks, {place.engine: loads[place.engine] for place in good})
        self._router.gave(blocks, engine)
        return next(place for place in good if place.engine == engine)
