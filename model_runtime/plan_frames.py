"""A StepPlan as frames, for the ranks that follow: what they need of it, with a digest. Engine process and followers.

Frames are the digest, a head, all buffers in a row, and the pixels of each image. Anything else is a `FrameError`.
"""

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from scheduler.plan import INT, ImageJobs, ImagePixels, ImageSpans, PoolRows, SampleRows, ScoreRows, StateRuns, StepPlan

Frame = bytes | memoryview
ITEM = array(INT).itemsize
NUM_BUFFERS = 25


class FrameError(Exception):
    """Frames that are no plan, or not the one that was sent."""


class PixelsHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`ImagePixels` without the data."""

    tiles: int
    height: int
    width: int
    rows: int
    cols: int
    image_height: int
    image_width: int


class PlanHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A plan without its buffers, of which it has the lengths."""

    number: int
    """Of plans that the sender has sent before."""
    step_id: int
    by_draft_model: bool
    lengths: tuple[int, ...]
    images: tuple[PixelsHead, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PlanHead)


def _buffers(plan: StepPlan) -> "tuple[array[int], ...]":
    """Those that a follower needs, int32 all. It samples, scores and sums nothing, so of these it needs the
    rows."""
    jobs, spans = plan.encode, plan.images
    return (
        *(plan.token_ids, plan.query_lens, plan.kv_lens, plan.block_tables, plan.rope_positions, plan.drop_slots),
        *(jobs.slots, jobs.num_embeddings),
        *(spans.rows, spans.lengths, spans.slots, spans.firsts, spans.starts, spans.ends),
        *(plan.sample.rows, plan.score.rows, plan.free_blocks, plan.normed_slots),
        *(plan.pool.rows, plan.pool.counts, plan.states.ends, plan.states.reads, plan.states.writes),
        *(plan.adapted, plan.free_states),
    )


def _plan(head: PlanHead, buffers: "Sequence[array[int]]", pixels: tuple[ImagePixels, ...]) -> StepPlan:
    token_ids, query_lens, kv_lens, tables, positions, drops, jobs, counts = buffers[:8]
    rows, lengths, slots, firsts, starts, ends, sampled, scored, free, normed_slots, pooled, counted = buffers[8:20]
    run_ends, reads, writes, adapted, free_states = buffers[20:]
    return StepPlan(
        step_id=head.step_id,
        token_ids=token_ids,
        query_lens=query_lens,
        kv_lens=kv_lens,
        block_tables=tables,
        rope_positions=positions,
        drop_slots=drops,
        encode=ImageJobs(slots=jobs, num_embeddings=counts, pixels=pixels),
        images=ImageSpans(rows=rows, lengths=lengths, slots=slots, firsts=firsts, starts=starts, ends=ends),
        sample=SampleRows(rows=sampled),
        score=ScoreRows(rows=scored),
        pool=PoolRows(rows=pooled, counts=counted),
        states=StateRuns(ends=run_ends, reads=reads, writes=writes),
        adapted=adapted,
        free_blocks=free,
        free_states=free_states,
        normed_slots=normed_slots,
        by_draft_model=head.by_draft_model,
    )


def _digest(frames: Sequence[Frame]) -> bytes:
    digest = hashlib.sha256()
    for frame in frames:
        digest.update(frame)
    return digest.digest()


def _head(image: ImagePixels) -> PixelsHead:
    sizes = (image.tiles, image.height, image.width, image.rows, image.cols)
    return PixelsHead(*sizes, image.image_height, image.image_width)


def encode(plan: StepPlan, number: int) -> list[Frame]:
    """The frames of plan `number` of this sender."""
    buffers, images = _buffers(plan), plan.encode.pixels
    lengths = tuple(len(buffer) for buffer in buffers)
    head = PlanHead(number, plan.step_id, plan.by_draft_model, lengths, tuple(map(_head, images)))
    frames: list[Frame] = [_encoder.encode(head), b"".join(buffers), *(image.data for image in images)]
    return [_digest(frames), *frames]


def decode(frames: Sequence[Frame]) -> tuple[int, StepPlan]:
    """Number and plan. Raises FrameError."""
    if len(frames) < 3 or _digest(frames[1:]) != frames[0]:
        raise FrameError("the digest of a plan is not that of its frames")
    try:
        head = _decoder.decode(frames[1])
    except (msgspec.DecodeError, RecursionError) as error:
        raise FrameError(f"a plan's head is malformed: {error}") from None
    body, data = memoryview(frames[2]), frames[3:]
    total = sum(head.lengths) * ITEM
    if len(head.lengths) != NUM_BUFFERS or min(head.lengths) < 0 or total != len(body):
        raise FrameError(f"{len(head.lengths)} buffers of {total} bytes in a frame of {len(body)}")
    if len(head.images) != len(data):
        raise FrameError(f"{len(data)} frames of pixels for {len(head.images)} images")
    return head.number, _plan(head, _cut(body, head.lengths), tuple(map(_pixels, head.images, data)))


def _cut(body: memoryview, lengths: Sequence[int]) -> "list[array[int]]":
    buffers, start = [], 0
    for length in lengths:
        buffers.append(array(INT, bytes(body[start : start + length * ITEM])))
        start += length * ITEM
    return buffers


def _pixels(head: PixelsHead, data: Frame) -> ImagePixels:
    sides = (head.tiles, head.height, head.width)
    if min(sides) < 1 or 3 * head.tiles * head.height * head.width != len(data):
        raise FrameError(f"{len(data)} bytes of pixels for {sides}")
    return ImagePixels(
        data=data,
        tiles=head.tiles,
        height=head.height,
        width=head.width,
        rows=head.rows,
        cols=head.cols,
        image_height=head.image_height,
        image_width=head.image_width,
    )
