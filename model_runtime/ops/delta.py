"""What layers do that go through a text with a state: a short convolution and the gated delta rule. Each in plain
torch, token by token, which says what it means, and compiled, registered for 'cpu'. Engine and worker processes.

The compiled ones are batch invariant as those in `cpu`. Neither needs to know where a prompt is cut: each run of rows
reads a state and leaves one.

Legend: T tokens, C channels, W inputs that one output of a channel is made of; G query and key heads of K channels,
H value heads of V channels.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from model_runtime.batch import Runs
from model_runtime.kernels.library import library
from model_runtime.ops.cpu import assert_plain
from model_runtime.ops.registry import register
from model_runtime.state_store import StateLayer

NORM_EPS = 1e-6
"""Beside the sum of squares of a query or key."""


def _each(runs: Runs, states_N: Tensor) -> Iterator[tuple[slice, Tensor, int]]:
    """Rows of each run, a copy of the state before them, and where to leave the one behind them."""
    starts = runs.starts_G1.tolist()
    for g, (read, write) in enumerate(zip(runs.reads_G.tolist(), runs.writes_G.tolist(), strict=True)):
        before = torch.zeros_like(states_N[write]) if read < 0 else states_N[read].clone()
        yield slice(starts[g], starts[g + 1]), before, write


@register("short_conv", "any")
def short_conv(x_TC: Tensor, weight_CW: Tensor, state: StateLayer, runs: Runs) -> Tensor:
    """[T, C]: silu(sum over w of x[t - W + 1 + w] weight[w])."""
    out_TC = torch.empty_like(x_TC)
    for rows, past_PC, write in _each(runs, state.conv_NPC):
        inputs_LC = torch.cat((past_PC.to(x_TC.dtype), x_TC[rows]))
        windows_TCW = inputs_LC.unfold(0, weight_CW.shape[1], 1)
        out_TC[rows] = torch.nn.functional.silu((windows_TCW * weight_CW).sum(dim=-1))
        state.conv_NPC[write] = inputs_LC[len(inputs_LC) - len(past_PC) :]
    return out_TC


def _unit(heads_THK: Tensor) -> Tensor:
    return heads_THK * torch.rsqrt(heads_THK.square().sum(dim=-1, keepdim=True) + NORM_EPS)


@register("delta_rule", "any")
def delta_rule(qkv_TX: Tensor, decay: Tensor, beta_TH: Tensor, state: StateLayer, runs: Runs) -> Tensor:
    """[T, H V]: token after token."""
    (num_tokens, _), (_, num_heads, key_dim, value_dim) = qkv_TX.shape, state.delta_NHKV.shape
    value_width = num_heads * value_dim
    query_TGK, key_TGK = qkv_TX[:, :-value_width].reshape(num_tokens, 2, -1, key_dim).unbind(1)
    query_THK, key_THK = (
        _unit(heads_TGK).repeat_interleave(num_heads // heads_TGK.shape[1], dim=1) for heads_TGK in (query_TGK, key_TGK)
    )
    query_THK, value_THV = query_THK * key_dim**-0.5, qkv_TX[:, -value_width:].reshape(num_tokens, num_heads, -1)
    decay_THK1 = decay.view(num_tokens, num_heads, -1, 1)
    out_THV = torch.empty_like(value_THV, memory_format=torch.contiguous_format)
    for rows, state_HKV, write in _each(runs, state.delta_NHKV):
        state_HKV = state_HKV.to(qkv_TX.dtype)
        for t in range(rows.start, rows.stop):
            state_HKV = state_HKV * decay_THK1[t]
            known_HV = (state_HKV * key_THK[t, ..., None]).sum(dim=1)
            added_HV = (value_THV[t] - known_HV) * beta_TH[t, :, None]
            state_HKV = state_HKV + key_THK[t, ..., None] * added_HV[:, None]
            out_THV[t] = (state_HKV * query_THK[t, ..., None]).sum(dim=1)
        state.delta_NHKV[write] = state_HKV
    return out_THV.flatten(1)


def _pointers(runs: Runs) -> tuple[int, int, int]:
    return runs.starts_G1.data_ptr(), runs.reads_G.data_ptr(), runs.writes_G.data_ptr()


@register("short_conv", "cpu")
def short_conv_compiled(x_TC: Tensor, weight_CW: Tensor, state: StateLayer, runs: Runs) -> Tensor:
    """[T, C]"""
    assert_plain(x_TC, weight_CW, state.conv_NPC)
    (num_tokens, channels), num_inputs = x_TC.shape, weight_CW.shape[1]
    num_slots, num_past, state_channels = state.conv_NPC.shape
    assert (num_past + 1, state_channels, channels) == (num_inputs, channels, len(weight_CW)), "another layer's state"
    scratch_PC, out_TC = torch.empty(num_past, channels), torch.empty_like(x_TC)
    failed = library().short_conv(
        x_TC.data_ptr(),
        weight_CW.data_ptr(),
        *_pointers(runs),
        state.conv_NPC.data_ptr(),
        num_tokens,
        channels,
        num_inputs,
        len(runs.reads_G),
        num_slots,
        scratch_PC.data_ptr(),
        out_TC.data_ptr(),
    )
    assert not failed, "runs that do not cover the rows, or a state's slot that is not there"
    return out_TC


@register("delta_rule", "cpu")
def delta_rule_compiled(qkv_TX: Tensor, decay: Tensor, beta_TH: Tensor, state: StateLayer, runs: Runs) -> Tensor:
    """[T, H V]"""
    assert_plain(qkv_TX, decay, beta_TH, state.delta_NHKV)
    num_slots, num_heads, key_dim, value_dim = state.delta_NHKV.shape
    num_tokens, width = qkv_TX.shape
    key_heads, rest = divmod(width - num_heads * value_dim, 2 * key_dim)
    assert rest == 0 and num_heads % key_heads == 0, f"rows of {width} numbers do not fit the state"
    decays = 1 if decay.dim() == 2 else key_dim
    assert decay.numel() == num_tokens * num_heads * decays and beta_TH.shape == (num_tokens, num_heads), "odd gates"
    unit_qk, out_TX = torch.empty(num_tokens, 2 * key_heads * key_dim), torch.empty(num_tokens, num_heads * value_dim)
    failed = library().delta_rule(
        qkv_TX.data_ptr(),
        decay.data_ptr(),
        beta_TH.data_ptr(),
        *_pointers(runs),
        state.delta_NHKV.data_ptr(),
        num_tokens,
        num_heads,
        key_heads,
        key_dim,
        value_dim,
        decays,
        len(runs.reads_G),
        num_slots,
        unit_qk.data_ptr(),
        out_TX.data_ptr(),
    )
    assert not failed, "runs that do not cover the rows, or a state's slot that is not there"
    return out_TX
