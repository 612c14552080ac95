"""A StepPlan as tensors: the ragged batch that every layer sees. Engine and worker processes.

Legend: S sequences, T tokens of the step, B tokens in a KV block.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of different lengths, concatenated without padding. All tensors are int32 unless said."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    """int64 [T]: where a token's key and value go: block id * B + offset in the block."""
    query_starts_S1: Tensor
    """[S + 1]: tokens of sequence s are rows query_starts[s] .. query_starts[s + 1] - 1."""
    kv_lens_S: Tensor
    """[S]: keys in the cache once this step's are written; the sequence's last query stands at kv_len - 1."""
    block_tables: Tensor
    """Flat: block ids, sequence after sequence."""
    table_starts_S1: Tensor
    """[S + 1]: block table of sequence s is block_tables[table_starts[s] : table_starts[s + 1]]."""
    block_size: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.token_ids_T.shape[0])

    @property
    def num_sequences(self) -> int:
        """S."""
        return int(self.kv_lens_S.shape[0])


def _starts(lengths: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


def make_batch(plan: StepPlan, block_size: int, device: torch.device) -> Batch:
    """Derive positions and slots from a plan. Raises AssertionError where the plan contradicts itself."""
    query_lens = np.frombuffer(plan.query_lens, dtype=np.int32)
    kv_lens = np.frombuffer(plan.kv_lens, dtype=np.int32)
    tables = np.frombuffer(plan.block_tables, dtype=np.int32)
    query_starts, table_starts = _starts(query_lens), _starts(-(-kv_lens // block_size))
    assert query_starts[-1] == len(plan.token_ids), "query_lens must sum to the number of tokens"
    assert table_starts[-1] == len(tables), "block tables must cover kv_lens exactly"
    row_of_T = np.repeat(np.arange(len(query_lens)), query_lens)
    positions = np.arange(len(plan.token_ids), dtype=np.int32) + (kv_lens - query_lens - query_starts[:-1])[row_of_T]
    slots = tables[table_starts[row_of_T] + positions // block_size].astype(np.int64) * block_size
    slots += positions % block_size
    return Batch(
        token_ids_T=torch.frombuffer(plan.token_ids, dtype=torch.int32).to(device),
        positions_T=torch.from_numpy(positions.astype(np.int32, copy=False)).to(device),
        slots_T=torch.from_numpy(slots).to(device),
        query_starts_S1=torch.from_numpy(query_starts).to(device),
        kv_lens_S=torch.from_numpy(kv_lens.copy()).to(device),
        block_tables=torch.from_numpy(tables.copy()).to(device),
        table_starts_S1=torch.from_numpy(table_starts).to(device),
        block_size=block_size,
    )
