"""Block tables of the sequences: reserve, grow, share, release. Joins the block pool and the prefix cache.

Owned by `Scheduler`, engine process. A block that is full and computed is shared and never written again: hits cover
whole blocks only and leave at least one token to compute, so that a sequence writes only into blocks of its own.
"""

from scheduler.block_pool import BlockPool
from scheduler.config import MAX_STEP_DRAFTS, SchedulerConfig
from scheduler.image_spans import span_content
from scheduler.prefix_cache import CachedBlock, PrefixCache, block_key, root_key
from scheduler.sequence import Sequence
from scheduler.state_slots import StateSlots


class KVBlocks:
    """A pool of `num_blocks` blocks of `block_size` tokens. `states` are slots beside them for models with states."""

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool, states: StateSlots | None = None
    ) -> None:
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._cache = PrefixCache()
        self.states = states
        self.pool = BlockPool(num_blocks, self._forget)

    @property
    def draft_room(self) -> int:
        """Drafts that the next step may have, if there are blocks for them."""
        return MAX_STEP_DRAFTS if self.states is None else self.states.draft_room

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self._block_size)

    def reserve(self, seq: Sequence, *, spare: int) -> bool:
        """Give a sequence without blocks those of all its known tokens, taking what it can from the prefix cache.

        Does nothing and returns False unless the token that it samples would fit as well and `spare` blocks stay
        available.
        """
        assert not seq.blocks, f"sequence {seq.request.seq_id} has blocks already"
        if self.pool.num_available <= spare:
            return False
        found = self._find_prefix(seq)
        hits = found if self.states is None else found[: self.states.find(found)]
        taken = self.blocks_for(seq.room_to_start) - sum(self.pool.references(block) > 0 for block in hits)
        if taken + spare > self.pool.num_available:
            return False
        for block in hits:
            self.pool.retain(block)
        if self.states is not None:
            self.states.start(seq, hits, len(found))
        seq.blocks.extend(hits)
        seq.num_registered = len(hits)
        seq.num_computed = len(hits) * self._block_size
        for _ in range(self.blocks_for(len(seq.tokens)) - len(hits)):
            seq.blocks.append(self.pool.allocate())
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make the block table cover `num_tokens`, at most one block more than it has; False if there is none."""
        if num_tokens <= len(seq.blocks) * self._block_size:
            return True
        if self.pool.num_available == 0:
            return False
        seq.blocks.append(self.pool.allocate())
        return True

    def cover(self, seq: Sequence, num_tokens: int, *, spare: int = 0) -> int:
        """Make the block table cover `num_tokens`, or as many as there are blocks for beside `spare` ones; returns how
        many it covers."""
        while num_tokens > len(seq.blocks) * self._block_size and self.pool.num_available > spare:
            seq.blocks.append(self.pool.allocate())
        return min(num_tokens, len(seq.blocks) * self._block_size)

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks behind the known tokens: those of drafts that did not hold."""
        needed = self.blocks_for(len(seq.tokens))
        if len(seq.blocks) > needed:
            for block in reversed(seq.blocks[needed:]):
                self.pool.release(block, keep=False)
            del seq.blocks[needed:]

    def register(self, seq: Sequence) -> None:
        """Offer the full blocks computed since the last call to the prefix cache, and the states of the last step."""
        num_full = seq.num_computed // self._block_size
        if self._prefix_caching and num_full > seq.num_registered:
            for index in range(seq.num_registered, num_full):
                self._cache.insert(seq.blocks[index], self._cached_block(seq, index))
            seq.num_registered = num_full
        if self.states is not None:
            self.states.settle(seq, lambda index: self._cache.find(*self._cached_block(seq, index)))

    def release(self, seq: Sequence) -> None:
        """Take all blocks from a sequence. The end of a text goes first, so that it is evicted before its beginning."""
        if self.states is not None and seq.blocks:
            self.states.release(seq)
        for block in reversed(seq.blocks):
            self.pool.release(block, keep=self._cache.holds(block))
        del seq.blocks[:]
        seq.num_registered = seq.num_computed = 0

    def forget_cached(self) -> tuple[list[int], list[int]]:
        """Forget all that nobody uses; (blocks, slots for states) that are free then."""
        return self.pool.forget_cached(), [] if self.states is None else self.states.free

    def distrust(self, seq: Sequence) -> None:
        """Never serve the blocks of a failed sequence to others, nor states that it left behind blocks of theirs: its
        numbers may not be finite."""
        if self.states is not None:
            known = (self._cache.find(*self._cached_block(seq, index)) for index in range(seq.num_registered))
            for block in known:
                if block is not None:
                    self.states.forget(block)
        for block in seq.blocks:
            self._forget(block)

    def awaits(self, seq: Sequence, other: Sequence) -> bool:
        """Whether the next block that `other` completes is one that `seq` can take from the prefix cache then; where
        there are states, the next one that a state is kept behind."""
        index = other.num_computed // self._block_size
        if self.states is not None:
            index = self.states.next_mark(other, other.num_computed) // self._block_size - 1
        if not self._prefix_caching or index >= min(self._shareable(seq), len(other.tokens) // self._block_size):
            return False
        return self._agree(seq, other, 0) and self._agree(seq, other, index)

    def check(self, running: list[Sequence]) -> None:
        """Assert conservation, references and sharing. O(blocks)."""
        references = [0] * self.pool.num_blocks
        salts: dict[int, bytes] = {}
        for seq in running:
            assert len(seq.blocks) >= self.blocks_for(seq.num_computed), "computed tokens without a block"
            assert len(set(seq.blocks)) == len(seq.blocks), "a block twice in one table"
            for block in seq.blocks:
                references[block] += 1
                assert salts.setdefault(block, seq.request.cache_salt) == seq.request.cache_salt, "salts share a block"
        for seq in running:
            for block in seq.blocks[seq.num_computed // self._block_size :]:
                assert references[block] == 1, f"block {block} is shared and will be written"
                assert not self._cache.holds(block), f"block {block} is cached and will be written"
        self.pool.check(references, self._cache.holds)
        self._cache.check()
        if self.states is not None:
            self.states.check(running, self._cache.holds)

    def _forget(self, block: int) -> None:
        self._cache.forget(block)
        if self.states is not None:
            self.states.forget(block)

    def _shareable(self, seq: Sequence) -> int:
        """Blocks that a sequence may take from the cache: full ones that leave a token to compute."""
        return 0 if seq.needs_every_row else (len(seq.tokens) - 1) // self._block_size

    def _find_prefix(self, seq: Sequence) -> list[int]:
        hits: list[int] = []
        if self._prefix_caching:
            for index in range(self._shareable(seq)):
                block = self._cache.find(*self._cached_block(seq, index))
                if block is None:
                    break
                hits.append(block)
        return hits

    def _content(self, seq: Sequence, index: int) -> bytes:
        start, end = index * self._block_size, (index + 1) * self._block_size
        token_bytes = seq.tokens[start:end].tobytes()
        return token_bytes + span_content(seq.request.images, start, end) if start < seq.image_end else token_bytes

    def _agree(self, seq: Sequence, other: Sequence, index: int) -> bool:
        """Whether two sequences are equal up to the end of a full block."""
        return self._cached_block(seq, index).key == self._cached_block(other, index).key

    def _cached_block(self, seq: Sequence, index: int) -> CachedBlock:
        """What a full block holds; computed once, since a sequence that waits looks for its blocks in every step."""
        while len(seq.full_blocks) <= index:
            position = len(seq.full_blocks)
            parent = seq.full_blocks[-1].key if position else root_key(seq.request.cache_salt, adapted=seq.is_adapted)
            content = self._content(seq, position)
            seq.full_blocks.append(CachedBlock(block_key(parent, content), parent, content))
        return seq.full_blocks[index]


def make_blocks(config: SchedulerConfig, num_blocks: int, *, has_states: bool) -> KVBlocks:
    """As configured."""
    size = config.block_size
    running, drafts, checkpoints = config.max_num_seqs, config.num_draft_states, config.num_checkpoints
    states = StateSlots(running, drafts, checkpoints, size) if has_states else None
    return KVBlocks(num_blocks, size, prefix_caching=config.enable_prefix_caching, states=states)
