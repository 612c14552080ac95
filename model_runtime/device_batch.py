"""Batches for a GPU: block tables padded to one length, all arrays in one pinned buffer, one copy. Called by `graphs`,
engine and worker processes.

Legend: S sequences, P entries of a block table.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from model_runtime.batch import Batch

ALIGNMENT = 16
"""Bytes; each array of the buffer begins at a multiple."""


def padded(batch: Batch, *, num_sequences: int, table_length: int, spare_block: int) -> Batch:
    """A batch on CPU with block tables of `table_length` entries, and with sequences of one token added until there are
    `num_sequences`. These read and write nothing but the first slot of `spare_block`, which belongs to nobody."""
    count, extra = batch.num_sequences, num_sequences - batch.num_sequences
    assert extra >= 0, f"{count} sequences do not fit {num_sequences}"
    tables_SP = torch.full((num_sequences, table_length), spare_block, dtype=torch.int32)
    lengths_S = batch.table_starts_S1.diff()
    tables_SP[:count][torch.arange(table_length) < lengths_S[:, None]] = batch.block_tables
    kv_lens_S = pad(batch.kv_lens_S, (0, extra), value=1)
    added_starts = batch.query_starts_S1[-1] + torch.arange(1, extra + 1, dtype=torch.int32)
    query_starts_S1 = torch.cat([batch.query_starts_S1, added_starts])
    return replace(
        batch,
        token_ids_T=pad(batch.token_ids_T, (0, extra)),
        positions_T=pad(batch.positions_T, (0, extra)),
        slots_T=pad(batch.slots_T, (0, extra), value=spare_block * batch.block_size),
        query_starts_S1=query_starts_S1,
        kv_lens_S=kv_lens_S,
        block_tables=tables_SP.flatten(),
        table_starts_S1=torch.arange(num_sequences + 1, dtype=torch.int32) * table_length,
        rope_rows_T=pad(batch.rope_rows_T, (0, extra)),
        key_starts_S1=pad(kv_lens_S.cumsum(0, dtype=torch.int32), (1, 0)),
        max_query_len=int(query_starts_S1.diff().max()),
    )


def pack(batch: Batch, *, pinned: bool) -> Tensor:
    """All arrays of a batch on CPU in one buffer of bytes. Pinned memory can be copied to a GPU while the CPU goes on;
    torch does not give it out again before that is done."""
    arrays = _arrays(batch).values()
    buffer = torch.empty(sum(map(_room, arrays)), dtype=torch.uint8, pin_memory=pinned)
    for part, array in zip(_parts(buffer, arrays), arrays, strict=True):
        part.copy_(array)
    return buffer


def unpack(buffer: Tensor, like: Batch) -> Batch:
    """The batch whose arrays lie in a buffer that `pack` made of `like`, or in a copy of it."""
    arrays = _arrays(like)
    parts = dict(zip(arrays, _parts(buffer, arrays.values()), strict=True))
    return replace(like, **parts)  # type: ignore[arg-type]


def upload(batch: Batch, device: torch.device) -> Batch:
    """A batch on CPU with its block tables padded, on a device."""
    longest = int(batch.table_starts_S1.diff().max())
    ready = padded(batch, num_sequences=batch.num_sequences, table_length=longest, spare_block=0)
    buffer = pack(ready, pinned=device.type == "cuda")
    return unpack(buffer.to(device, non_blocking=True), ready)


def _arrays(batch: Batch) -> dict[str, Tensor]:
    """Those that the batch has, by field; not those of its images, which are on the device already."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _room(array: Tensor) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT


def _parts(buffer: Tensor, arrays: Iterable[Tensor]) -> Iterator[Tensor]:
    """Views of the buffer with the types and shapes of the arrays."""
    begin = 0
    for array in arrays:
        yield buffer[begin : begin + array.nbytes].view(array.dtype).view(array.shape)
        begin += _room(array)
