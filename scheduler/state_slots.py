"""Which slots hold the states of texts, for models with layers that go through a text with one. Owned by `KVBlocks`,
engine process.

A running sequence has a slot of its own. Others keep *checkpoints*: the state behind a full block that the prefix cache
knows. A text that begins alike goes on from the last one, so a hit ends there. States are never copied: a run of rows
reads one slot and writes another (`plan.StateRuns`), so a checkpoint is made by a run that ends at its mark and writes
its slot, and used by a run that reads it.

A draft is a run of its own that writes a spare slot. When it is known how many drafts hold, the slot that the last of
these wrote becomes the sequence's own, and the others are spare again.

Marks are the end of the last full block of a prompt, where its text was found in the prefix cache and no state was
(two texts part there), and every so many tokens.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from scheduler.plan import NO_STATE
from scheduler.sequence import Sequence

MARK_TOKENS = 512
"""Between marks in a long text."""


class StateSlots:
    """Slots for `num_running` sequences and `num_drafts` drafts in flight, and behind them for `num_checkpoints`."""

    def __init__(self, num_running: int, num_drafts: int, num_checkpoints: int, block_size: int) -> None:
        self._block_size = block_size
        self._num_drafts, self._num_checkpoints = num_drafts, num_checkpoints
        self._first_checkpoint = num_running + num_drafts
        self._step = max(1, MARK_TOKENS // block_size) * block_size
        self.draft_room = num_drafts
        """Drafts that the next step may have, beside slots for all sequences that may run."""
        checkpoints = range(self._first_checkpoint, self._first_checkpoint + num_checkpoints)
        self._free, self._free_checkpoints = [*reversed(range(self._first_checkpoint))], [*reversed(checkpoints)]
        self._kept: OrderedDict[int, int] = OrderedDict()
        """Block -> slot of the state behind it, the one that was used longest ago first."""
        self._holders = [0] * (self._first_checkpoint + num_checkpoints)
        """Of a checkpoint's slot: sequences that go on from there, runs in flight that write it, and the block that it
        is kept for. Without any it is free."""

    @property
    def free(self) -> list[int]:
        """Slots with nothing in them that anybody will read."""
        return [*self._free, *self._free_checkpoints]

    def find(self, blocks: list[int]) -> int:
        """How many of the blocks that a text begins with lie before a state that it can go on from."""
        return next((count for count in range(len(blocks), 0, -1) if blocks[count - 1] in self._kept), 0)

    def start(self, seq: Sequence, blocks: list[int], num_found: int) -> None:
        """A sequence begins to run, from behind `blocks` that `find` gave, of `num_found` that the cache has."""
        state = seq.state
        state.own = self._free.pop()
        state.parting = num_found * self._block_size if num_found > len(blocks) else 0
        if blocks:
            self._kept.move_to_end(blocks[-1])
            state.newest = self._kept[blocks[-1]]
            self._hold(state.newest)

    def runs(self, seq: Sequence, end: int) -> Iterator[tuple[int, int, int]]:
        """A step computes the rows up to `end`, of which those behind the known tokens are drafts: (one past the last
        row, slot to read, slot to write) of each run."""
        newest = seq.state.newest
        for run_end, slot in self._writes(seq, end):
            seq.state.written.append((run_end, slot))
            yield run_end, newest, slot
            newest = slot

    def next_mark(self, seq: Sequence, position: int) -> int:
        """The first one behind a position."""
        last_of_prompt = (seq.num_prompt - 1) // self._block_size * self._block_size
        marks = (seq.state.parting, last_of_prompt, position // self._step * self._step + self._step)
        return min(mark for mark in marks if mark > position)

    def settle(self, seq: Sequence, known_block: Callable[[int], int | None]) -> None:
        """The runs of its step are computed. `known_block` tells under which block the prefix cache has the text of a
        full block."""
        state, before = seq.state, seq.state.newest
        state.newest = next(slot for end, slot in state.written if end == seq.num_computed)
        for end, slot in state.written:
            if self._is_checkpoint(slot) and end <= seq.num_computed:
                block = known_block(end // self._block_size - 1)
                if block is not None and block not in self._kept:
                    self._kept[block] = slot
                    self._hold(slot)
        self._hold(state.newest)
        self._let_go(seq, state.own if self._is_checkpoint(state.newest) else state.newest)
        self._drop(before)

    def release(self, seq: Sequence) -> None:
        """A sequence ends, or waits again."""
        state = seq.state
        self._let_go(seq, state.own)
        self._drop(state.newest)
        self._free.append(state.own)
        state.own = state.newest = NO_STATE

    def forget(self, block: int) -> None:
        """The prefix cache forgets a block."""
        slot = self._kept.pop(block, None)
        if slot is not None:
            self._drop(slot)

    def check(self, running: list[Sequence], holds: Callable[[int], bool]) -> None:
        """Assert that each slot is somebody's or free, and that checkpoints are of blocks that the prefix cache has."""
        own = [seq.state.own for seq in running]
        drafts = [slot for seq in running for slot in self._of_drafts(seq)]
        slots = list(range(self._first_checkpoint))
        assert sorted(own + drafts + self._free) == slots, "a slot is lost or two sequences have it"
        assert self.draft_room == self._num_drafts - len(drafts), "drafts in flight are miscounted"
        holders = [0] * len(self._holders)
        for slot in self._kept.values():
            holders[slot] += 1
        for seq in running:
            for slot in (*(slot for _, slot in seq.state.written), seq.state.newest):
                holders[slot] += self._is_checkpoint(slot)
        assert holders == self._holders, "holders of states are miscounted"
        used = [slot for slot, count in enumerate(holders) if count]
        checkpoints = list(range(self._first_checkpoint, self._first_checkpoint + self._num_checkpoints))
        assert sorted(used + self._free_checkpoints) == checkpoints, "a checkpoint's slot is lost or in use and free"
        assert all(map(holds, self._kept)), "a state of a block that cannot be found"

    def _writes(self, seq: Sequence, end: int) -> Iterator[tuple[int, int]]:
        """Where the runs of a step end, and the slots that they write: at marks a checkpoint's if there is one, at the
        last known token the sequence's own, at each draft a spare one."""
        position, known = seq.num_computed, min(end, len(seq.tokens))
        while (mark := self.next_mark(seq, position)) <= known and (slot := self._take_checkpoint()) is not None:
            yield mark, slot
            position = mark
        if position < known:
            yield known, seq.state.own
        for draft_end in range(known + 1, end + 1):
            slot = self._take_checkpoint() if draft_end == self.next_mark(seq, draft_end - 1) else None
            yield draft_end, self._take_spare() if slot is None else slot

    def _take_spare(self) -> int:
        """A slot for the state behind a draft."""
        assert self.draft_room, "more drafts than there are slots for"
        self.draft_room -= 1
        return self._free.pop()

    def _of_drafts(self, seq: Sequence) -> list[int]:
        """The spare slots that the step in flight of a sequence writes."""
        return [slot for _, slot in seq.state.written if slot != seq.state.own and not self._is_checkpoint(slot)]

    def _take_checkpoint(self) -> int | None:
        """A slot to write: a free one, else that of the checkpoint that was used longest ago; None if all are held."""
        if not self._free_checkpoints:
            only_kept = (block for block, slot in self._kept.items() if self._holders[slot] == 1)
            block = next(only_kept, None)
            if block is None:
                return None
            self.forget(block)
        slot = self._free_checkpoints.pop()
        self._hold(slot)
        return slot

    def _let_go(self, seq: Sequence, own: int) -> None:
        """The step is over: of its own slot and those of its drafts, the sequence keeps `own`."""
        state, spare = seq.state, self._of_drafts(seq)
        self.draft_room += len(spare)
        self._free += (slot for slot in (*spare, state.own) if slot != own)
        for _, slot in state.written:
            self._drop(slot)
        state.own = own
        state.written.clear()

    def _is_checkpoint(self, slot: int) -> bool:
        return slot >= self._first_checkpoint

    def _hold(self, slot: int) -> None:
        """One more holder, if it is a checkpoint's."""
        if self._is_checkpoint(slot):
            self._holders[slot] += 1

    def _drop(self, slot: int) -> None:
        """The inverse of `_hold`."""
        if self._is_checkpoint(slot):
            self._holders[slot] -= 1
            if not self._holders[slot]:
                self._free_checkpoints.append(slot)
