"""Batches for a GPU, on CPU: what is padded, and that one buffer holds all arrays."""

import torch

from model_runtime.batch import Batch
from model_runtime.device_batch import ALIGNMENT, pack, padded, unpack, upload
from tests.model_runtime.op_cases import CPU, batch_with_blocks

BLOCKS = [4, 9, 2, 7, 5]
SPARE = 11


def ragged() -> Batch:
    """Sequences of 3, 1 and 2 blocks of 8 tokens."""
    return batch_with_blocks([1, 1, 1], [20, 3, 16], [*BLOCKS, 1], 8)


def test_sequences_and_tables_are_filled_up() -> None:
    batch = padded(ragged(), num_sequences=5, table_length=4, spare_block=SPARE)
    tables = [[4, 9, 2, SPARE], [7, *[SPARE] * 3], [5, 1, SPARE, SPARE], [SPARE] * 4, [SPARE] * 4]
    assert batch.block_tables.view(5, 4).tolist() == tables
    assert batch.table_starts_S1.tolist() == [0, 4, 8, 12, 16, 20]
    assert batch.token_ids_T.tolist() == [0] * 5
    assert batch.positions_T.tolist() == batch.rope_rows_T.tolist() == [19, 2, 15, 0, 0]
    assert batch.slots_T.tolist() == [2 * 8 + 3, 7 * 8 + 2, 1 * 8 + 7, SPARE * 8, SPARE * 8]
    assert batch.query_starts_S1.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.kv_lens_S.tolist() == [20, 3, 16, 1, 1]
    assert batch.key_starts_S1 is not None and batch.key_starts_S1.tolist() == [0, 20, 23, 39, 40, 41]
    assert (batch.num_tokens, batch.num_sequences, batch.max_query_len) == (5, 5, 1)


def test_what_fits_is_not_filled_up() -> None:
    given = batch_with_blocks([4, 1], [20, 3], BLOCKS[:4], 8)
    batch = upload(given, CPU)
    assert batch.block_tables.view(2, 3).tolist() == [[4, 9, 2], [7, 0, 0]]
    assert torch.equal(batch.slots_T, given.slots_T) and torch.equal(batch.query_starts_S1, given.query_starts_S1)
    assert batch.max_query_len == 4


def test_types_are_those_of_the_batch() -> None:
    given = ragged()
    batch = padded(given, num_sequences=4, table_length=3, spare_block=SPARE)
    for name in ("token_ids_T", "positions_T", "slots_T", "query_starts_S1", "kv_lens_S", "block_tables"):
        assert getattr(batch, name).dtype == getattr(given, name).dtype
    assert batch.table_starts_S1.dtype == torch.int32
    assert batch.key_starts_S1 is not None and batch.key_starts_S1.dtype == torch.int32


def test_one_buffer_holds_all_arrays() -> None:
    given = batch_with_blocks([4, 1], [20, 3], BLOCKS[:4], 8, spans=[(0, 17, 20)])
    batch = padded(given, num_sequences=2, table_length=3, spare_block=SPARE)
    buffer = pack(batch, pinned=False)
    found = unpack(buffer.clone(), batch)
    names = [name for name in Batch.__dataclass_fields__ if isinstance(getattr(batch, name), torch.Tensor)]
    assert set(names) >= {"visible_ends_T", "key_starts_S1", "slots_T"}
    for name in names:
        array, expected = getattr(found, name), getattr(batch, name)
        assert torch.equal(array, expected) and array.dtype == expected.dtype
        assert array.storage_offset() * array.element_size() % ALIGNMENT == 0
    assert found.rope_positions_T3 is None
    assert buffer.numel() == sum(-(-getattr(batch, name).nbytes // ALIGNMENT) * ALIGNMENT for name in names)
