"""Plans as frames: what a follower needs arrives, what is damaged is a typed error."""

import random
from array import array
from dataclasses import fields, is_dataclass, replace

import msgspec
import pytest

from model_runtime import plan_frames
from model_runtime.plan_frames import NUM_BUFFERS, FrameError, decode, encode
from scheduler.plan import (
    ImageJobs,
    ImagePixels,
    ImageSpans,
    SampleRows,
    ScoreRows,
    StateRuns,
    StepPlan,
    floats,
    ints,
)

NOT_SENT = {("sample", field.name) for field in fields(SampleRows) if field.name != "rows"} | {
    ("score", "targets"),
    ("score", "top_logprobs"),
    *(("pool", name) for name in ("rows", "counts", "sums", "sum_offsets")),
}
"""What only rank 0 needs: it alone samples, scores and pools."""


def full_plan() -> StepPlan:
    """Every buffer has something in it, each something else."""
    numbers = iter(range(1, 10_000))

    def some(length: int) -> "array[int]":
        return ints([next(numbers) for _ in range(length)])

    pixels = tuple(
        ImagePixels(
            data=bytes(range(3 * tiles * 4)),
            tiles=tiles,
            height=2,
            width=2,
            rows=7,
            cols=8,
            image_height=9,
            image_width=6,
        )
        for tiles in (1, 2)
    )
    return StepPlan(
        step_id=2**40,
        token_ids=some(5),
        query_lens=some(2),
        kv_lens=some(2),
        block_tables=some(7),
        sample=SampleRows(rows=some(2), temperature=floats([0.5, 1.0]), history_ids=some(30)),
        score=ScoreRows(rows=some(3), targets=some(3), top_logprobs=some(3)),
        rope_positions=some(15),
        drop_slots=some(1),
        free_blocks=some(4),
        free_states=some(3),
        normed_slots=some(2),
        encode=ImageJobs(slots=some(2), num_embeddings=some(2), pixels=pixels),
        images=ImageSpans(rows=some(1), lengths=some(1), slots=some(1), firsts=some(1), starts=some(1), ends=some(1)),
        states=StateRuns(ends=some(2), reads=some(2), writes=some(2)),
        adapted=some(1),
        by_draft_model=True,
    )


def differences(a: object, b: object, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Names of the fields in which two plans differ."""
    if not is_dataclass(a):
        return set() if a == b else {path}
    return {
        name
        for field in fields(a)
        for name in differences(getattr(a, field.name), getattr(b, field.name), (*path, field.name))
    }


def test_a_follower_gets_all_of_a_plan_but_what_only_rank_0_needs() -> None:
    plan = full_plan()
    number, received = decode(encode(plan, 41))
    assert number == 41
    lost = differences(plan, received)
    assert lost == {
        ("sample", "temperature"),
        ("sample", "history_ids"),
        ("score", "targets"),
        ("score", "top_logprobs"),
    }
    empty = StepPlan(
        step_id=0,
        token_ids=ints(),
        query_lens=ints(),
        kv_lens=ints(),
        block_tables=ints(),
        sample=SampleRows(),
        score=ScoreRows(),
    )
    assert differences(plan, empty) >= differences(plan, received)
    never_sent = {name for name in every_buffer(plan) if name not in lost and name not in differences(empty, received)}
    assert never_sent | lost == NOT_SENT, "a new field of the plan must be sent, or be listed here"


def every_buffer(value: object, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Names of all buffers of a plan."""
    if isinstance(value, array):
        return {path}
    if not is_dataclass(value):
        return set()
    return {name for field in fields(value) for name in every_buffer(getattr(value, field.name), (*path, field.name))}


def test_a_plan_without_anything_travels_too() -> None:
    plan = StepPlan(
        step_id=3,
        token_ids=ints([1]),
        query_lens=ints([1]),
        kv_lens=ints([1]),
        block_tables=ints([0]),
        sample=SampleRows(),
        score=ScoreRows(),
    )
    assert decode(encode(plan, 0)) == (0, plan)


def test_damaged_frames_are_a_typed_error() -> None:
    frames, random_ = [bytes(frame) for frame in encode(full_plan(), 1)], random.Random(1)
    for _ in range(300):
        damaged = list(frames)
        index = random_.randrange(len(damaged))
        kind = random_.choice(["flip", "cut", "drop", "double", "noise"])
        frame = damaged[index]
        if kind == "flip":
            at = random_.randrange(len(frame))
            damaged[index] = frame[:at] + bytes([frame[at] ^ random_.randrange(1, 256)]) + frame[at + 1 :]
        elif kind == "cut":
            damaged[index] = frame[: random_.randrange(len(frame))]
        elif kind == "drop":
            del damaged[index]
        elif kind == "double":
            damaged.insert(index, frame)
        else:
            damaged[index] = random_.randbytes(random_.randrange(64))
        with pytest.raises(FrameError):
            decode(damaged)
    with pytest.raises(FrameError):
        decode([])


def signed(head: object, body: bytes, *pixels: bytes) -> list[bytes]:
    """Frames with the right digest."""
    frames = [msgspec.msgpack.encode(head), body, *pixels]
    return [plan_frames._digest(frames), *frames]


def test_nonsense_with_the_right_digest_is_a_typed_error() -> None:
    lengths = [1] + [0] * (NUM_BUFFERS - 1)
    good = [1, 2, False, lengths, []]
    assert decode(signed(good, bytes(4)))[1].token_ids == ints([0])
    image = [1, 2, 2, 0, 0, 2, 2]
    for head, body, pixels in (
        ({}, b"", []),
        ([1], b"", []),
        ([*good, 1], bytes(4), []),
        ([1, 2, False, [1], []], bytes(4), []),
        ([1, 2, False, [2, -1] + [0] * (NUM_BUFFERS - 2), []], bytes(4), []),
        (good, bytes(8), []),
        (good, bytes(4), [b""]),
        ([1, 2, False, lengths, [image]], bytes(4), []),
        ([1, 2, False, lengths, [image]], bytes(4), [bytes(11)]),
        ([1, 2, False, lengths, [[-1, -2, 2, 0, 0, 2, 2]]], bytes(4), [bytes(12)]),
    ):
        with pytest.raises(FrameError):
            decode(signed(head, body, *pixels))
    assert decode(signed([1, 2, False, lengths, [image]], bytes(4), bytes(12)))[1].encode.pixels[0].data == bytes(12)


def test_the_same_plan_has_the_same_digest_and_another_has_not() -> None:
    plan = full_plan()
    assert encode(plan, 1)[0] == encode(full_plan(), 1)[0]
    assert encode(plan, 1)[0] != encode(plan, 2)[0]
    assert encode(plan, 1)[0] != encode(replace(plan, by_draft_model=False), 1)[0]
