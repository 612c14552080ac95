"""A step's batch in parts that stages of a pipeline compute one after the other: while one stage computes a part, the
one before computes the next. Arithmetic only; every stage cuts alike. Engine and worker processes.

A row does not depend on which part it is in: keys of earlier rows of its sequence are written by the time that a stage
comes to it.

Legend: T tokens of the step, S sequences, G runs of rows between two states, A rows that an adapter changes.
"""

from dataclasses import replace
from itertools import pairwise
from math import sqrt

import torch

from model_runtime.batch import Batch, ImageRows, Runs

FIXED_ROWS = 8
"""A part of n rows takes as long as FIXED_ROWS + n rows would, were there nothing else."""


def num_parts(num_tokens: int, num_stages: int) -> int:
    """How many take the least time: of m equal parts, the last stage is done after m + `num_stages` - 1 of them."""
    return max(1, round(sqrt((num_stages - 1) * num_tokens / FIXED_ROWS)))


def parts(batch: Batch, num_stages: int) -> list[Batch]:
    """The batch in order, in parts of nearly equal numbers of rows."""
    count = num_parts(batch.num_tokens, num_stages)
    cuts = {_uncut(batch, index * batch.num_tokens // count) for index in range(1, count)}
    ends = sorted({0, batch.num_tokens, *cuts})
    return [batch] if len(ends) == 2 else [part(batch, range(*rows)) for rows in pairwise(ends)]


def _uncut(batch: Batch, row: int) -> int:
    """The first row from `row` on before which the batch may be cut: not within an image that attends in both
    directions."""
    if batch.visible_ends_T is None:
        return row
    while row < batch.num_tokens and batch.visible_ends_T[row - 1] > batch.positions_T[row - 1] + 1:
        row += 1
    return row


def part(batch: Batch, rows: range) -> Batch:
    """Some rows of a batch that is in host memory. Of a sequence that is cut, it sees the keys up to its last row."""
    where = slice(rows.start, rows.stop)
    edges = torch.tensor([rows.start, rows.stop - 1], dtype=torch.int32)
    first, last = (torch.searchsorted(batch.query_starts_S1, edges, right=True) - 1).tolist()
    query_starts_S1 = batch.query_starts_S1[first : last + 2].clamp(rows.start, rows.stop)
    return replace(
        batch,
        token_ids_T=batch.token_ids_T[where],
        positions_T=batch.positions_T[where],
        slots_T=batch.slots_T[where],
        query_starts_S1=query_starts_S1 - rows.start,
        kv_lens_S=batch.positions_T[query_starts_S1[1:] - 1] + 1,
        table_starts_S1=batch.table_starts_S1[first : last + 2],
        rope_rows_T=batch.rope_rows_T[where],
        rope_positions_T3=None if batch.rope_positions_T3 is None else batch.rope_positions_T3[where],
        visible_ends_T=None if batch.visible_ends_T is None else batch.visible_ends_T[where],
        images=tuple(cut for images in batch.images if (cut := _image_rows(images, rows)) is not None),
        adapted_A=None if batch.adapted_A is None else _inside(batch.adapted_A, rows),
        runs=None if batch.runs is None else _runs(batch.runs, rows),
    )


def _inside(rows_A: torch.Tensor, rows: range) -> torch.Tensor:
    """Those of some rows that are within `rows`, counted from there."""
    return rows_A[(rows_A >= rows.start) & (rows_A < rows.stop)] - rows.start


def _runs(runs: Runs, rows: range) -> Runs:
    """Those that have some of `rows`. One that is cut leaves its state where the whole one would, and goes on from
    there."""
    starts_G, ends_G = runs.starts_G1[:-1], runs.starts_G1[1:]
    inside_G = (starts_G < rows.stop) & (ends_G > rows.start)
    starts_G, writes_G = starts_G[inside_G], runs.writes_G[inside_G]
    return Runs(
        starts_G1=torch.cat((starts_G, ends_G[inside_G][-1:])).clamp(rows.start, rows.stop) - rows.start,
        reads_G=torch.where(starts_G < rows.start, writes_G, runs.reads_G[inside_G]),
        writes_G=writes_G,
    )


def _image_rows(images: ImageRows, rows: range) -> ImageRows | None:
    """Those that are within `rows`; None if none are."""
    length = len(images.embeddings_NC)
    first, end = max(images.start, rows.start), min(images.start + length, rows.stop)
    if first >= end:
        return None
    inside = slice(first - images.start, end - images.start)
    return ImageRows(
        start=first - rows.start,
        embeddings_NC=images.embeddings_NC[inside],
        deepstack_NC=tuple(level_NC[inside] for level_NC in images.deepstack_NC),
    )
