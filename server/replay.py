"""The sequences that have not ended, with what it takes to start each of them again, and which of them may be the cause
of crashes.

Kept by `server/client.py`; API process. An engine's result for a sequence depends on nothing but its prompt, parameters
and output so far (batch invariance, counter-based random numbers), so another engine that is given these goes on as the
lost one would have. `dispatch.py` says which one.

Suspicion: a sequence that was with an engine in two crashes, without a token between them, may be their cause.
Suspects are tried one after the other where they were, each with nobody beside it who has not proved innocent: with its
next token it has. One whose trial ends in a crash is guilty, and explains the crashes before, so all others are free.

Containment: the first crash that nobody outside can have caused may have had its cause among its sequences already.
They stay with their replica until each has a token, so that whoever it is cannot take one replica after the other.
Where somebody outside may have killed the engine, or suspects explain the crash, the rest goes on wherever there is an
engine.
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
    replica: int | None = None
    """Where a suspect, or one that is contained, must go on."""

    @property
    def is_proved(self) -> bool:
        """Nothing speaks against it, or it had a token since."""
        return self.points is None and self.replica is None

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
        self.has_suspects = False
        """There may be some."""
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

    @property
    def suspects(self) -> list[Live]:
        """Oldest first."""
        if self.has_suspects:
            found = [live for live in self._live.values() if live.points is not None]
            self.has_suspects = bool(found)
            return found
        return []

    def sent(self, live: Live, generation: int) -> None:
        """The engine of this generation has it now."""
        live.engine = generation
        self.stats.sequences_replayed += live.lost_at is not None

    def take(self, live: Live, token_ids: list[int]) -> None:
        """New tokens, which also prove that it is not what makes engines crash."""
        live.outputs.extend(token_ids)
        live.points = live.replica = None
        if live.lost_at is not None:
            self.stats.sequences_resumed += 1
            self.stats.pause_seconds += time.monotonic() - live.lost_at
            live.lost_at = None

    def engine_lost(self, generation: int, replica: int, *, from_outside: bool) -> list[Live]:
        """An engine of this replica has ended, perhaps for a reason `from_outside`. Returns the guilty, which the
        caller ends."""
        self.stats.engines_lost += 1
        lost = [live for live in self._live.values() if live.engine == generation]
        for live in lost:
            live.engine, live.replica = NOWHERE, None
            live.lost_at = live.lost_at or time.monotonic()
            if live.points is not None:
                live.points += 1 if from_outside else GUILTY
            elif live.crashed_at == len(live.outputs):
                live.points = 0
                self.has_suspects = True
            live.crashed_at = len(live.outputs)
        suspects = [live for live in lost if live.points is not None]
        for live in suspects or ([] if from_outside else lost):
            live.replica = replica
        guilty = [live for live in suspects if live.points is not None and live.points >= GUILTY]
        if guilty:
            self._acquit_all()
            self.stats.sequences_quarantined += len(guilty)
        return guilty

    def start_failed(self, replica: int) -> None:
        """Who must go on there need not wait for it any longer."""
        for live in self._live.values():
            if live.replica == replica:
                live.replica = None

    def _acquit_all(self) -> None:
        self.has_suspects = False
        for live in self._live.values():
            live.points = live.crashed_at = live.replica = None
