"""Which full KV blocks hold which beginning of a text. Owned by `kv_blocks.KVBlocks`, engine process.

A block's key is a chained hash: sha256(key of the block before it, its content); the first block's parent is a hash of
the cache salt, so different salts share nothing, and of whether an adapter changes the text's keys and values. The
content is the token ids and, since the rows of all images have the same id, what stands where of which image. Whatever
else the KV of a block depends on belongs into `root_key` or the content, and nowhere else. sha256, because keys
separate tenants.
"""

from hashlib import sha256
from typing import NamedTuple


def root_key(cache_salt: bytes, *, adapted: bool = False) -> bytes:
    """The parent of a first block."""
    return sha256((b"adapted" if adapted else b"root") + cache_salt).digest()


def block_key(parent: bytes, content: bytes) -> bytes:
    """The key of a full block: parent's key (32 bytes) and the block's content."""
    return sha256(parent + content).digest()


class CachedBlock(NamedTuple):
    """What a block holds; the hash is only the way to find it."""

    key: bytes
    parent: bytes
    content: bytes
    """The int32 token ids, then the images' part (`image_spans.span_content`)."""


class PrefixCache:
    """A one-to-one map between keys and the blocks that hold their content, used or not."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._content: dict[int, CachedBlock] = {}

    def find(self, key: bytes, parent: bytes, content: bytes) -> int | None:
        """The block with exactly this content, or None. A hash alone is never believed."""
        block = self._block_of.get(key)
        if block is None or self._content[block] != (key, parent, content):
            return None
        return block

    def insert(self, block: int, content: CachedBlock) -> None:
        """Remember a full block. Of two blocks with equal content the first stays the known one."""
        assert block not in self._content, f"block {block} was written while its content is shared"
        if content.key not in self._block_of:
            self._block_of[content.key] = block
            self._content[block] = content

    def holds(self, block: int) -> bool:
        """Whether the block can be found."""
        return block in self._content

    def forget(self, block: int) -> None:
        """Never serve this block again. Idempotent."""
        content = self._content.pop(block, None)
        if content is not None:
            del self._block_of[content.key]

    def check(self) -> None:
        """Assert that both directions of the map agree."""
        assert len(self._block_of) == len(self._content), "keys and blocks are not one to one"
        for block, content in self._content.items():
            assert self._block_of[content.key] == block, f"block {block} is known under another's key"
