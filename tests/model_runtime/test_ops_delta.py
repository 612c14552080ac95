"""The operations that go through a text with a state: against transformers, float64, and themselves with other runs."""

import random

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from model_runtime.batch import Runs
from model_runtime.ops import set_threads
from model_runtime.ops.registry import Ops
from model_runtime.state_store import StateLayer
from scheduler.plan import NO_STATE
from tests.model_runtime.op_cases import EXACT, assert_close, compiled, randn

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, INPUTS = 2, 4, 24, 72, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
SLOTS = 12


def runs_of(lengths: list[int], reads: list[int], writes: list[int]) -> Runs:
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Runs(
        starts_G1=starts,
        reads_G=torch.tensor(reads, dtype=torch.int32),
        writes_G=torch.tensor(writes, dtype=torch.int32),
    )


def states(dtype: torch.dtype = torch.float32) -> StateLayer:
    """Full of NaN."""
    conv_NPC = torch.full((SLOTS, INPUTS - 1, CHANNELS), float("nan"), dtype=dtype)
    return StateLayer(conv_NPC, torch.full((SLOTS, HEADS, KEY_DIM, VALUE_DIM), float("nan"), dtype=dtype))


def gates(num_tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """Decays, of a head or of each of its channels, and betas."""
    decay = torch.exp(-torch.nn.functional.softplus(randn(num_tokens, HEADS, width, seed=2)))
    return decay[..., 0].contiguous() if width == 1 else decay, torch.sigmoid(randn(num_tokens, HEADS, seed=3))


@pytest.mark.parametrize("width", [1, KEY_DIM])
def test_the_delta_rule_is_that_of_transformers(ops: Ops, width: int) -> None:
    length = 21
    qkv, (decay, beta) = randn(length, CHANNELS, seed=1), gates(length, width)
    state = states()
    out = ops.delta_rule(qkv, decay, beta, state, runs_of([length], [NO_STATE], [3]))
    split = qkv.split([KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, HEADS * VALUE_DIM], dim=1)
    query, key, value = (part.view(1, length, heads, -1) for part, heads in zip(split, (2, 2, 4), strict=True))
    if width == 1:
        function = torch_recurrent_gated_delta_rule
    else:
        function = chunk_kimi_delta_attention
        query, key = query.repeat_interleave(2, dim=2), key.repeat_interleave(2, dim=2)
    expected, last = function(
        query, key, value, g=decay.log()[None], beta=beta[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert last is not None
    assert_close(out, expected.flatten(2)[0].double(), 1e-5)
    assert_close(state.delta_NHKV[3], last[0].double(), 1e-5)


def test_the_short_convolution_is_torchs(ops: Ops) -> None:
    x, weight = randn(19, CHANNELS, seed=1), randn(CHANNELS, INPUTS, seed=2)
    state = states()
    out = ops.short_conv(x, weight, state, runs_of([19], [NO_STATE], [0]))
    wide = torch.nn.functional.conv1d(x.T.double(), weight[:, None].double(), padding=INPUTS - 1, groups=CHANNELS)
    assert_close(out, torch.nn.functional.silu(wide.T[:19]), 1e-6)
    assert torch.equal(state.conv_NPC[0], x[-3:])


def cut_runs(draw: random.Random, lengths: list[int]) -> list[tuple[Runs, list[int]]]:
    """Steps that go through sequences of these lengths side by side, in random runs that leave states in random slots;
    with the rows of each, counted through all sequences."""
    free, at, done = draw.sample(range(SLOTS), SLOTS), [NO_STATE] * len(lengths), [0] * len(lengths)
    steps = []
    while done != lengths:
        step: list[tuple[int, int, int]] = []
        rows: list[int] = []
        left: list[int] = []
        for index, length in enumerate(lengths):
            for _ in range(draw.randrange(3)):
                count = min(length - done[index], draw.choice((1, 1, 2, 7)))
                if not count:
                    continue
                write = at[index] if at[index] != NO_STATE and draw.random() < 0.5 else free.pop(0)
                step.append((count, at[index], write))
                if at[index] not in (NO_STATE, write):
                    left.append(at[index])
                first = sum(lengths[:index]) + done[index]
                rows += range(first, first + count)
                at[index], done[index] = write, done[index] + count
        free += left
        if step:
            counts, reads, writes = (list(column) for column in zip(*step, strict=True))
            steps.append((runs_of(counts, reads, writes), rows))
    return steps


@pytest.mark.parametrize("width", [1, KEY_DIM])
@pytest.mark.parametrize("seed", range(3))
def test_rows_do_not_depend_on_how_runs_are_cut(width: int, seed: int) -> None:
    """Bit for bit, with any number of threads; and in one run they are what the reference says in float64."""
    ops, before, lengths = compiled(), torch.get_num_threads(), [23, 1, 9]
    x, weight = randn(sum(lengths), CHANNELS, seed=1), randn(CHANNELS, INPUTS, seed=2)
    decay, beta = gates(sum(lengths), width)

    def through(ops: Ops, rows: list[int], state: StateLayer, runs: Runs) -> Tensor:
        dtype = state.delta_NHKV.dtype
        mixed = ops.short_conv(x[rows].to(dtype), weight.to(dtype), state, runs)
        return ops.delta_rule(mixed, decay[rows].to(dtype), beta[rows].to(dtype), state, runs)

    every, whole = list(range(sum(lengths))), runs_of(lengths, [NO_STATE] * 3, [0, 1, 2])
    expected = through(ops, every, states(), whole)
    assert_close(expected, through(EXACT, every, states(torch.float64), whole), 1e-5)
    set_threads(1 + seed)
    state, seen = states(), 0
    for runs, rows in cut_runs(random.Random(seed), lengths):
        assert torch.equal(through(ops, rows, state, runs), expected[rows])
        seen += len(rows)
    set_threads(before)
    assert seen == sum(lengths)


@pytest.mark.parametrize(("lengths", "read", "write"), [([3], -2, 0), ([3], SLOTS, 0), ([3], 0, SLOTS), ([2], 0, 0)])
def test_runs_that_are_out_of_range_are_refused(lengths: list[int], read: int, write: int) -> None:
    ops, runs, state = compiled(), runs_of(lengths, [read], [write]), states()
    decay, beta = gates(3, 1)
    with pytest.raises(AssertionError, match="slot that is not there"):
        ops.short_conv(randn(3, CHANNELS), randn(CHANNELS, INPUTS), state, runs)
    with pytest.raises(AssertionError, match="slot that is not there"):
        ops.delta_rule(randn(3, CHANNELS), decay, beta, state, runs)
