"""Kimi Delta Attention with what Kimi K3 has beside Kimi Linear, a bound of its decays and a gate of full rank, against
GLM-5's block of the same kind in transformers; and what config.json may say of layers with states."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextLinearAttention

from model_runtime.architecture import DeltaRule, ModelConfig
from model_runtime.batch import Runs
from model_runtime.blocks.delta import DeltaBlock, delta_table
from model_runtime.hf.config import read_hf_config
from model_runtime.ops.registry import Ops
from model_runtime.share import split
from model_runtime.state_store import allocate_states
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.load import load_parameters
from model_runtime.weights.safetensors_source import read_safetensors
from scheduler.plan import NO_STATE
from tests.checkpoints import HYBRID, SMALL
from tests.model_runtime.op_cases import CPU, assert_close, batch_of, randn

HEADS, WIDTH, HIDDEN, LENGTH = 4, 24, 64, 33
LINEAR: dict[str, object] = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2],
    "num_heads": HEADS,
    "head_dim": WIDTH,
    "short_conv_kernel_size": 3,
}


def kimi(**changes: object) -> dict[str, object]:
    """A config.json of Kimi Linear as it is published, with other keys in linear_attn_config."""
    return {
        "model_type": "kimi_linear",
        "vocab_size": 259,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "model_max_length": 512,
        "kv_lora_rank": 24,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mla_use_nope": True,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "moe_intermediate_size": 24,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
        "first_k_dense_replace": 2,
        "eos_token_id": 2,
        "routed_scaling_factor": 2.446,
        "linear_attn_config": LINEAR | changes,
    }


def glm_block(bound: float | None, *, full_rank: bool) -> Glm5NextTextLinearAttention:
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        linear_num_heads=HEADS,
        linear_head_dim=WIDTH,
        linear_conv_kernel_dim=3,
        linear_lower_bound=bound,
        layer_types=["linear_attention"],
    )
    block = Glm5NextTextLinearAttention(config, 0)
    if full_rank:
        block.g_a_proj, block.g_b_proj = nn.Identity(), nn.Linear(HIDDEN, HEADS * WIDTH, bias=False)
    with torch.no_grad():
        for seed, parameter in enumerate(block.parameters()):
            parameter.copy_(0.3 * randn(*parameter.shape, seed=seed))
    return block


def as_published(block: Glm5NextTextLinearAttention, *, full_rank: bool) -> dict[str, Tensor]:
    """The block's tensors under Kimi's names, convolutions apart and flat as the table wants them."""
    found = {}
    for name, tensor in block.state_dict().items():
        plain = name.replace("forget_gate.", "")
        if name == "conv1d.weight":
            parts = zip("qkv", tensor.flatten().chunk(3), strict=True)
            found |= {f"a.{part}_conv1d.weight": rows.clone() for part, rows in parts}
        else:
            found["a." + (plain.replace("g_b_proj", "g_proj") if full_rank else plain)] = tensor
    return found


@pytest.mark.parametrize("full_rank", [False, True])
@pytest.mark.parametrize("bound", [None, -5.0])
def test_the_block_is_that_of_transformers(ops: Ops, tmp_path: Path, bound: float | None, full_rank: bool) -> None:
    block = glm_block(bound, full_rank=full_rank)
    save_file(as_published(block, full_rank=full_rank), tmp_path / "model.safetensors")
    read = read_hf_config(kimi(gate_lower_bound=bound, use_full_rank_gate=full_rank), None)
    config = replace(read, rms_norm_eps=1e-6)
    table, source = delta_table(config, "b", "a"), read_safetensors(tmp_path)
    parameters = load_parameters(table, source, ops, CPU, lambda key: False, lambda count: None, split(config, 1)[0])
    x, state = randn(LENGTH, HIDDEN, seed=99), allocate_states(config, 1)
    starts, read, write = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, LENGTH], [NO_STATE], [0]))
    runs = Runs(starts_G1=starts, reads_G=read, writes_G=write)
    batch = replace(batch_of([LENGTH], [LENGTH], 16, 8), runs=runs)
    expected = block(x[None])[0]
    assert expected.std() > 0.1
    assert_close(DeltaBlock(config, "b", parameters).forward(ops, x, batch, state), expected.detach().double(), 1e-4)


def test_published_keys_of_kimi_linear() -> None:
    read = read_hf_config(kimi(gate_lower_bound=-5.0, use_full_rank_gate=True), None)
    assert read.delta == DeltaRule(
        layers=(True, False, True),
        key_heads=HEADS,
        value_heads=HEADS,
        key_dim=WIDTH,
        value_dim=WIDTH,
        conv_width=3,
        decay_rank=WIDTH,
        decay_bound=-5.0,
        gate="sigmoid",
    )
    assert (read.rope.rotary_dim, read.max_position, read.head_dim) == (0, 512, 24)
    assert read.attention_scale == pytest.approx(24**-0.5)
    assert read.experts is not None
    assert (read.experts.num_experts, read.experts.num_chosen, read.experts.dense_layers) == (6, 2, (0, 1))
    plain = read_hf_config(kimi(), None).delta
    assert plain is not None and (plain.decay_bound, plain.gate_rank) == (0.0, WIDTH)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kda_layers": [1]}, "together 1 to 3"),
        ({"kda_layers": [1, "3"]}, "kda_layers must be a list of layers"),
        ({"kda_layers": 1}, "kda_layers must be a list of layers"),
        ({"kda_layers": [0, 2], "full_attn_layers": [1]}, "together 1 to 3"),
        ({"kda_layers": [1, 2, 3], "full_attn_layers": []}, "at least one layer"),
        ({"gate_lower_bound": 1.0}, "gate_lower_bound must be a negative number"),
        ({"gate_lower_bound": float("nan")}, "gate_lower_bound must be a negative number"),
        ({"num_heads": 0}, "linear_num_heads must be a positive integer"),
    ],
)
def test_what_is_wrong_in_kimis_keys_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_hf_config(kimi(**changes), None)


@pytest.mark.parametrize(
    ("key", "value"), [("mla_use_nope", False), ("moe_layer_freq", 2), ("mla_use_output_gate", True)]
)
def test_other_kinds_of_kimi_are_refused(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=key):
        read_hf_config(kimi() | {key: value}, None)


def qwen(**changes: object) -> ModelConfig:
    saved = CONFIG_MAPPING["qwen3_next"](**(SMALL | HYBRID)).to_dict()
    return read_hf_config(saved | changes, None)


def test_layers_of_qwen3_next_follow_the_interval_where_they_are_not_listed() -> None:
    read = qwen(num_hidden_layers=8, layer_types=None, full_attention_interval=3)
    assert read.delta is not None
    assert read.delta.layers == (True, True, False, True, True, False, True, True)
    assert (read.delta.interleaved, read.delta.gate, read.attention_gate) == (True, "silu", True)
    assert read.norm_weights_less_one
    assert replace(read, first_layer=2, num_layers=3).delta_layers == (False, True, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention", "linear_attention"]}, "a list with a full_attention"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "2 of linear_attention, full_attention"),
        ({"linear_num_value_heads": 3}, "a multiple of the 2 key heads"),
    ],
)
def test_what_is_wrong_in_qwens_keys_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        qwen(**changes)
