"""MiMo-V2: what its layers keep of a token differs from layer to layer; published files name things otherwise than
transformers; memory is as planned. Its logits are in test_families."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_runtime.caches import allocate_caches
from model_runtime.checkpoint import load_model
from model_runtime.hf.config import read_hf_config
from model_runtime.memory.budget import PlanError
from model_runtime.memory.caches import cache_block_bytes
from model_runtime.ops import load_ops
from model_runtime.share import split
from model_runtime.weights.errors import CheckpointError
from tests.align.cases import make_aligned
from tests.family_cases import make_random_model
from tests.model_runtime.memory import assert_activations_as_planned
from tests.model_runtime.paged import DEVICE
from tests.model_runtime.test_alignment import random_prompts

PUBLISHED: dict[str, object] = {
    "model_type": "mimo_v2_flash",
    "vocab_size": 152576,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 0, 1],
    "moe_layer_freq": [0, 1, 1, 1, 1, 1],
    "sliding_window": 128,
    "sliding_window_size": 128,
    "attention_chunk_size": 128,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "rope_scaling": None,
    "partial_rotary_factor": 0.334,
    "layernorm_epsilon": 1e-5,
    "attention_value_scale": 0.707,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "max_position_embeddings": 262144,
}
"""As a published config.json has it, of the first layers."""


def test_published_keys_mean_what_those_of_transformers_do() -> None:
    rope = {"rope_type": "default", "partial_rotary_factor": 0.334}
    theirs = {
        "rope_parameters": {
            "full_attention": rope | {"rope_theta": 5000000.0},
            "sliding_attention": rope | {"rope_theta": 10000.0},
        },
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", *["sparse"] * 5],
        "sliding_window": 129,
        "rms_norm_eps": 1e-5,
    }
    dropped = (
        "hybrid",
        "moe_layer",
        "sliding_window_size",
        "swa",
        "rope",
        "layernorm",
        "add_",
        "partial",
        "attention_c",
    )
    same = {key: value for key, value in PUBLISHED.items() if not key.startswith(dropped)}
    read = read_hf_config(PUBLISHED, None)
    assert read == read_hf_config(same | theirs, None)
    assert read.sliding_windows == (0, 129, 129, 129, 0, 129)
    assert (read.rope.rotary_dim, read.rope.theta, read.other_rope and read.other_rope.theta) == (64, 5e6, 1e4)
    assert read.kv_heads == (4, 8, 8, 8, 4, 8)
    assert [read.of_layer(layer).attention_sinks for layer in (0, 1)] == ["none", "layers"]
    assert read.experts is not None and read.experts.dense_layers == (0,) and read.experts.scale == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"swa_head_dim": 128}, "swa_head_dim must be 192, as head_dim"),
        ({"swa_num_key_value_heads": 6}, "swa_num_key_value_heads must be a multiple of num_key_value_heads 4"),
        ({"v_head_dim": 256, "swa_v_head_dim": 256}, "v_head_dim must be at most head_dim, 192"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias must be False"),
        ({"attention_projection_layout": "fused_qkv"}, "attention_projection_layout must be 'split'"),
        ({"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern must be 6 of 0 and 1"),
        ({"moe_layer_freq": 1}, "moe_layer_freq must be 6 of 0 and 1"),
        ({"mlp_layer_types": [[]] * 6}, "mlp_layer_types must be 6 of dense and sparse"),
    ],
)
def test_refusals(change: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_hf_config(PUBLISHED | change, None)


def test_caches_are_as_wide_as_their_layers() -> None:
    config = read_hf_config(PUBLISHED, None)
    for share in split(config, 2):
        for layers in (share, share.of_stage(replace(share.layers, start=3, stop=6), 2)):
            own = layers.narrowed(config)
            caches = allocate_caches(own, 2, 16, torch.bfloat16, DEVICE)
            pools = [pool for cache in caches for pool in cache.pools]
            assert [pool.shape[1] for pool in pools[::2]] == [
                heads // 2 for heads in config.kv_heads[own.first_layer :]
            ]
            assert sum(pool.numel() * pool.itemsize for pool in pools) == 2 * cache_block_bytes(own, 16, torch.bfloat16)
    # 192 channels of a key and as many of a value, 2 + 3 x 4 + 2 + 4 heads in 6 layers, of 16 tokens, 2 bytes
    assert cache_block_bytes(split(config, 2)[0].narrowed(config), 16, torch.bfloat16) == 2 * 192 * 20 * 16 * 2


def test_more_ranks_than_key_heads_are_refused() -> None:
    with pytest.raises(PlanError, match="4 key/value heads of layers that have fewer than others cannot be divided"):
        split(read_hf_config(PUBLISHED, None), 8)


def test_layers_for_drafts_are_left_out(tmp_path: Path) -> None:
    make_random_model(tmp_path, "mimo_v2_flash", 0)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.mtp.layers.0.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    assert load_model(tmp_path, load_ops(DEVICE, "reference"), DEVICE, lambda done: None).config.num_draft_layers == 0


@pytest.mark.parametrize("value_dim", [32, 64])
def test_activations_are_as_planned(tmp_path: Path, value_dim: int) -> None:
    make_random_model(tmp_path, "mimo_v2_flash", 0, {"head_dim": 96, "v_head_dim": value_dim})
    decoder = load_model(tmp_path, load_ops(DEVICE, "auto"), DEVICE, lambda done: None).decoder
    assert_activations_as_planned(decoder, random_prompts((200,))[0])
    assert json.loads((tmp_path / "config.json").read_text())["v_head_dim"] == value_dim


@pytest.mark.parametrize("ranks", [1, 2])
def test_align_knows_which_heads_a_layer_has(tmp_path: Path, ranks: int) -> None:
    assert make_aligned(tmp_path, "mimo_v2_flash", 1).compared(ranks=ranks).passed
