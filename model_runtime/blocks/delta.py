"""Layers that go through a text with a state in place of attention: Gated DeltaNet (arXiv 2412.06464) and Kimi Delta
Attention (arXiv 2510.26692), with their weight tables. Called by `mixer.py`, engine and worker processes.

Queries, keys and values go through a short convolution, then the gated delta rule; what it gives is normalised by head
and multiplied with a gate. The two differ in what decays (a head, or each channel of its keys), in the gate's function,
and in whether decays and gate come from the hidden state at once or through short vectors.

Legend: T tokens, C hidden size; G query and key heads of K channels, H value heads of V channels, X = 2 G K + H V, W
inputs of the convolution.
"""

import torch
from torch import Tensor

from model_runtime.architecture import DeltaRule, ModelConfig
from model_runtime.batch import Batch
from model_runtime.ops.registry import Linear, Ops
from model_runtime.state_store import StateLayer
from model_runtime.weights.table import Parameter, Parameters, Slot, linear_table, norm_table

Parts = tuple[tuple[str, int], ...]
"""Names of checkpoint tensors and the rows that they fill."""


def delta_table(config: ModelConfig, name: str, key: str) -> list[Parameter]:
    """The parameters under `name` and the checkpoint keys under `key` that fill them."""
    rule = delta_of(config)
    keys, values = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
    qkv: Parts = (("q_proj", keys), ("k_proj", keys), ("v_proj", values))
    convolved: Parts = (("q_conv1d.weight", keys), ("k_conv1d.weight", keys), ("v_conv1d.weight", values))
    made: Parts = (*qkv, ("g_proj", values))
    gates: Parts = (("b_proj", rule.value_heads), ("a_proj", rule.value_heads))
    if rule.interleaved:
        made, gates = (("qkvz_proj", 2 * keys + 2 * values),), (("ba_proj", 2 * rule.value_heads),)
    elif rule.gate_rank:
        made = qkv
    if rule.decay_rank:
        gates = gates[:1]
    decays = rule.value_heads * (rule.key_dim if rule.decay_rank else 1)
    table = linear_table(f"{name}.made", _slots(key, made), config.hidden_size, bias=False)
    table += linear_table(f"{name}.gates", _slots(key, gates), config.hidden_size, bias=False)
    if rule.decay_rank:
        table += _through_short_vector(config, f"{name}.decay", f"{key}.f", rule.decay_rank, decays)
    if rule.gate_rank:
        table += _through_short_vector(config, f"{name}.gate", f"{key}.g", rule.gate_rank, values)
    flat = tuple(Slot(f"{key}.{part}", rows * rule.conv_width, "delta") for part, rows in convolved)
    return [
        *table,
        Parameter(name=f"{name}.convolution", slots=flat),
        Parameter(name=f"{name}.decay_rate", slots=(Slot(f"{key}.A_log", rule.value_heads, "delta"),)),
        Parameter(name=f"{name}.decay_bias", slots=(Slot(f"{key}.dt_bias", decays, "delta"),)),
        norm_table(f"{name}.norm", f"{key}.o_norm", rule.value_dim, less_one=False),
        *linear_table(f"{name}.output", (Slot(f"{key}.o_proj", config.hidden_size),), values, False, "delta"),
    ]


def _slots(key: str, parts: Parts) -> tuple[Slot, ...]:
    return tuple(Slot(f"{key}.{part}", rows, "delta") for part, rows in parts)


def _through_short_vector(config: ModelConfig, name: str, key: str, rank: int, rows: int) -> list[Parameter]:
    down = linear_table(f"{name}_down", (Slot(f"{key}_a_proj", rank),), config.hidden_size, bias=False)
    return down + linear_table(f"{name}_up", (Slot(f"{key}_b_proj", rows, "delta"),), rank, bias=False)


class DeltaBlock:
    """The layers' part that other layers have attention for."""

    def __init__(self, config: ModelConfig, name: str, parameters: Parameters) -> None:
        """`config` is as wide as this rank's part of the layer."""
        self.rule, self._eps = delta_of(config), config.rms_norm_eps
        self._made, self._gates = parameters.linear(f"{name}.made"), parameters.linear(f"{name}.gates")
        self._decay = _short(parameters, f"{name}.decay") if self.rule.decay_rank else None
        self._gate = _short(parameters, f"{name}.gate") if self.rule.gate_rank else None
        vectors = parameters.vectors
        self._convolution_XW = vectors[f"{name}.convolution"].view(-1, self.rule.conv_width)
        self._rate_H1 = vectors[f"{name}.decay_rate"].exp()[:, None]
        self._decay_bias_HD = vectors[f"{name}.decay_bias"].view(self.rule.value_heads, -1)
        self._norm_V = vectors[f"{name}.norm"]
        self._output = parameters.linear(f"{name}.output")

    def forward(self, ops: Ops, x_TC: Tensor, batch: Batch, state: StateLayer) -> Tensor:
        """[T, C] -> [T, C]; goes on from the states that the batch's runs name, and leaves theirs."""
        assert batch.runs is not None, "a step of a model with states that does not say where they are"
        qkv_TX, gate_TX = self._split(_linear(ops, x_TC, self._made))
        decay, beta_TH = self._decays(ops, x_TC)
        mixed_TX = ops.short_conv(qkv_TX, self._convolution_XW, state, batch.runs)
        made_TX = ops.delta_rule(mixed_TX, decay, beta_TH, state, batch.runs)
        normed_TX = ops.rms_norm(made_TX.view(-1, self.rule.value_dim), self._norm_V, self._eps).view(made_TX.shape)
        if self._gate is not None:
            down, up = self._gate
            gate_TX = _linear(ops, _linear(ops, x_TC, down), up)
        normed_TX *= ops.activate(gate_TX, self.rule.gate)
        return _linear(ops, normed_TX, self._output)

    def _split(self, made_TX: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, keys and values [T, X], and what the gate is made of [T, H V], if it is in there."""
        rule = self.rule
        keys, values = rule.key_heads * rule.key_dim, rule.value_heads * rule.value_dim
        if not rule.interleaved:
            qkv_TX, gate_TX = made_TX[:, : 2 * keys + values], made_TX[:, 2 * keys + values :]
            return qkv_TX.contiguous(), gate_TX.contiguous()
        of_head = made_TX.view(len(made_TX), rule.key_heads, -1)
        widths = [rule.key_dim, rule.key_dim, values // rule.key_heads, values // rule.key_heads]
        query, key, value, gate = (part.flatten(1) for part in torch.split(of_head, widths, dim=2))
        return torch.cat((query, key, value), dim=1), gate.contiguous()

    def _decays(self, ops: Ops, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        """What is left of a state, [T, H] or [T, H, K], and how far a value replaces what the state says, [T, H]."""
        rule, made_TX = self.rule, _linear(ops, x_TC, self._gates)
        if rule.interleaved:
            beta_TH, decay_TX = (part.flatten(1) for part in made_TX.view(len(x_TC), rule.key_heads, 2, -1).unbind(2))
        else:
            beta_TH, decay_TX = made_TX[:, : rule.value_heads], made_TX[:, rule.value_heads :]
        if self._decay is not None:
            down, up = self._decay
            decay_TX = _linear(ops, _linear(ops, x_TC, down), up)
        biased_THD = decay_TX.reshape(len(x_TC), *self._decay_bias_HD.shape) + self._decay_bias_HD
        if rule.decay_bound:
            log_THD = ops.activate(biased_THD * self._rate_H1, "sigmoid") * rule.decay_bound
        else:
            log_THD = ops.activate(biased_THD, "softplus") * -self._rate_H1
        decay_THD = ops.activate(log_THD, "exp")
        decay = decay_THD if self._decay is not None else decay_THD.flatten(1)
        return decay, ops.activate(beta_TH.contiguous(), "sigmoid")


def delta_of(config: ModelConfig) -> DeltaRule:
    """Of an architecture that has it."""
    assert config.delta is not None, "the architecture has no delta rule"
    return config.delta


def _short(parameters: Parameters, name: str) -> tuple[Linear, Linear]:
    return parameters.linear(f"{name}_down"), parameters.linear(f"{name}_up")


def _linear(ops: Ops, x_TK: Tensor, linear: Linear) -> Tensor:
    return ops.linear(x_TK, linear.weight, linear.bias)
