"""The memory through which the ranks of one machine talk. It has no name: whoever makes it hands its descriptor to the
ranks, and it is gone with the last of them, however they end.

Made by the process that starts the ranks, which does not import torch; used by `shared_collectives`.
"""

import os
import tempfile

SLOT_BYTES = 256 * 1024
"""What a rank can say at once; a power of two. Longer things go in pieces of it, each while it is in the processor's
second cache."""
LINK_SLOTS = 8
"""Slots between a rank and the next one: so much it can send before that one takes something."""
LINE_BYTES, PAGE_BYTES = 64, 4096


def region_bytes(size: int) -> int:
    """Of the area of a group, as `kernels/collective.cpp` lays it out: lines of all ranks, two slots for each, and
    those of its link. What is not used takes no memory."""
    lines = -(-size * LINE_BYTES // PAGE_BYTES) * PAGE_BYTES
    return lines + (2 + LINK_SLOTS) * size * SLOT_BYTES


def make_region(*sizes: int) -> int:
    """A descriptor of new memory, all zero, with an area for each group of so many ranks; the caller closes it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("firstlight-ranks")
    else:
        with tempfile.TemporaryFile(prefix="firstlight-") as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, sum(map(region_bytes, sizes)))
    return descriptor
