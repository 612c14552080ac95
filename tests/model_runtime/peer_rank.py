"""A rank 1 of 2 without torch, for `test_shared_collectives`.

`python peer_rank.py LIBRARY DESCRIPTOR BYTES SLOT_BYTES`
It says when it is there, and sums for ever.
"""

import ctypes
import mmap
import sys


def main() -> None:
    """Until it is killed."""
    path, (descriptor, size, slot_bytes) = sys.argv[1], map(int, sys.argv[2:])
    library = ctypes.CDLL(path)
    library.fl_all_reduce.restype = ctypes.c_int64
    memory = mmap.mmap(descriptor, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    rank = (ctypes.c_int64 * 12)(address, 1, 2, slot_bytes, 60 * 10**9)
    library.fl_join(rank)
    print("there", flush=True)
    while True:
        numbers = (ctypes.c_float * 3)(1.0, 2.0, 3.0)
        if library.fl_all_reduce(rank, numbers, ctypes.c_int64(3)):
            sys.exit(1)


if __name__ == "__main__":
    main()
