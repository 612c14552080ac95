"""The sequences that have not ended, with what it takes to start each of them again, and who starts when.

Kept by `server/client.py`; API process. An engine's result for a sequence depends on nothing but its prompt, parameters
and output so far (batch invariance, counter-based random numbers), so a new engine that is given these goes on as the
lost one would have.

Suspicion: a sequence that was with the engine in two crashes, without a token between them, may be their cause.
Suspects are tried one after the other, each with nobody beside it who has not proved innocent: with its next token it
has. One whose trial ends in a crash is guilty, and explains the crashes before, so all others are free again.
"""

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from scheduler.plan import ints
from server import wire
from server.client_stream import ClientStream
from server.engine_link import NOWHERE
from server.generation import GenerationRequest, RecoveryStats

GUILTY = 3
"""Points at which a suspect is guilty. A crash of the engine's own is as many, and so is a step without end. What
may have come from outside, a kill or a silence, is a single one."""


@dataclass(slots=True, eq=False, kw_only=True)
class Live:
    """A sequence that has not ended."""

    stream: ClientStream
    choice: int
    request: GenerationRequest
    message: wire.Submit
    """As it is sent to the first engine."""
    outputs: "array[int]" = field(default_factory=ints)
    """int32: the tokens that were delivered."""
    engine: int = NOWHERE
    """Generation of the engine that has it."""
    lost_at: float | None = None
    """time.monotonic() at which its engine was lost; None once it goes on."""
    crashed_at: int | None = None
    """Tokens that it had in the last crash."""
    points: int | None = None
    """Of a suspect."""

    @property
    def replay(self) -> wire.Submit:
        """The message that starts it where it stands."""
        return msgspec.structs.replace(self.message, output_ids=self.outputs.tobytes())


class LiveSequences:
    """By seq_id, oldest first."""

    def __init__(self) -> None:
        self._live: dict[int, Live] = {}
        self.prompt_tokens = 0
        """Of all of them."""
        self._trial = False
        self.stats = RecoveryStats()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Live]:
        return iter(list(self._live.values()))

    def get(self, seq_id: int) -> Live | None:
        """None for one that has ended."""
        return self._live.get(seq_id)

    def add(self, live: Live) -> None:
        """A new one, which no engine has."""
        self._live[live.message.seq_id] = live
        self.prompt_tokens += live.stream.prompt_tokens

    def remove(self, seq_id: int) -> Live | None:
        """It has ended; None if it had before."""
        live = self._live.pop(seq_id, None)
        if live is not None:
            self.prompt_tokens -= live.stream.prompt_tokens
        return live

    def due(self, generation: int) -> list[Live]:
        """Those that the engine of this generation should have now and has not."""
        if not self._trial:
            return [live for live in self._live.values() if live.engine != generation]
        suspects = [live for live in self._live.values() if live.points is not None]
        if not suspects:
            self._trial = False
            return self.due(generation)
        return [] if any(live.engine == generation for live in suspects) else suspects[:1]

    def sent(self, live: Live, generation: int) -> None:
        """The engine of this generation has it now."""
        live.engine = generation
        self.stats.sequences_replayed += live.lost_at is not None

    def take(self, live: Live, token_ids: list[int]) -> None:
        """New tokens, which also prove that it is not what makes engines crash."""
        live.outputs.extend(token_ids)
        live.points = None
        if live.lost_at is not None:
            self.stats.sequences_resumed += 1
            self.stats.pause_seconds += time.monotonic() - live.lost_at
            live.lost_at = None

    def engine_lost(self, generation: int, *, from_outside: bool) -> list[Live]:
        """An engine has ended, perhaps for a reason `from_outside`. Returns the guilty, which the caller ends."""
        self.stats.engines_lost += 1
        lost = [live for live in self._live.values() if live.engine == generation]
        for live in lost:
            live.engine = NOWHERE
            live.lost_at = live.lost_at or time.monotonic()
            if live.points is not None:
                live.points += 1 if from_outside else GUILTY
            elif live.crashed_at == len(live.outputs):
                live.points = 0
                self._trial = True
            live.crashed_at = len(live.outputs)
        guilty = [live for live in lost if live.points is not None and live.points >= GUILTY]
        if guilty:
            self._acquit_all()
            self.stats.sequences_quarantined += len(guilty)
        return guilty

    def _acquit_all(self) -> None:
        self._trial = False
        for live in self._live.values():
            live.points = live.crashed_at = None
