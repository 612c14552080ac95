"""Which KV blocks are free, cached or referenced. Owned by `kv_blocks.KVBlocks`, engine process.

A block is in exactly one of three states: free (nothing of worth in it), cached (nobody uses it, its content may be
reused) or referenced (by one or more sequences). Every operation is O(1).
"""

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    """`num_blocks` blocks, all free. `on_evict(block)` is called before a cached block loses its content."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        assert num_blocks > 0, f"a pool needs blocks, got {num_blocks}"
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))
        # An OrderedDict is a linked list with an index: oldest first, O(1) removal from the middle.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unused blocks that keep their content until somebody needs the memory."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free and cached."""
        return len(self._free) + len(self._cached)

    def references(self, block: int) -> int:
        """How many sequences use the block."""
        return self._references[block]

    def allocate(self) -> int:
        """A block with one reference: a free one, else the cached one that was released longest ago."""
        if self._free:
            block = self._free.pop()
        else:
            assert self._cached, "no block is available"
            block, _ = self._cached.popitem(last=False)
            self._on_evict(block)
        self._references[block] = 1
        return block

    def forget_cached(self) -> list[int]:
        """Make the cached blocks free; all that are free then."""
        while self._cached:
            block, _ = self._cached.popitem(last=False)
            self._on_evict(block)
            self._free.append(block)
        return list(self._free)

    def retain(self, block: int) -> None:
        """One more sequence uses a cached or referenced block."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """One sequence fewer uses the block; after the last one it becomes cached (keep) or free."""
        assert self._references[block] > 0, f"block {block} was released more often than it was taken"
        self._references[block] -= 1
        if self._references[block] == 0:
            if keep:
                self._cached[block] = None
            else:
                self._free.append(block)

    def check(self, expected_references: list[int], holds_content: Callable[[int], bool]) -> None:
        """Assert that each block is in exactly one state, referenced as often as the sequences say, and cached only
        with content."""
        assert self._references == expected_references, "reference counts differ from the block tables"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is free and cached"
        referenced = sum(count > 0 for count in self._references)
        assert len(free) + len(cached) + referenced == self.num_blocks, "free + cached + referenced != total"
        assert not any(self._references[block] for block in free | cached), "a referenced block is up for reuse"
        assert all(map(holds_content, cached)), "a block without content is cached"
        assert not any(map(holds_content, free)), "a free block can be found"
