"""The configuration of DeepSeek-V3 and its kin: every spelling is read, what is not supported is refused by name."""

import math

import pytest
from transformers import DeepseekV3Config

from model_runtime.architecture import LatentAttention
from model_runtime.hf.config import read_hf_config
from model_runtime.weights.errors import CheckpointError
from tests.checkpoints import SMALL as LLAMA
from tests.model_runtime.deepseek import SMALL, YARN


def test_config_in_the_spelling_of_published_files() -> None:
    """Kimi K2's file has no head_dim, the old keys of rope, and options that transformers does not read."""
    saved = DeepseekV3Config(**SMALL, rope_parameters=YARN).to_dict()
    new = ("head_dim", "rope_parameters", "rope_interleave", "qk_head_dim", "transformers_version")
    published = {key: value for key, value in saved.items() if key not in new} | {
        "model_type": "kimi_k2",
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "yarn"} | {key: value for key, value in YARN.items() if not key.startswith("rope")},
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    found, expected = read_hf_config(published, None), read_hf_config(saved, None)
    assert found.family == "kimi_k2"
    assert (found.rope, found.attention_scale) == (expected.rope, expected.attention_scale)
    assert found.attention_scale == pytest.approx(24**-0.5 * (0.07 * math.log(8) + 1) ** 2)
    assert (found.head_dim, found.num_kv_heads, found.rope.rotary_dim, found.rope.interleaved) == (24, 4, 8, True)
    assert (
        found.latent
        == expected.latent
        == LatentAttention(query_rank=40, latent_rank=24, shared_dim=8, value_dim=12, bias=False)
    )
    assert found.experts is not None and found.experts == expected.experts
    assert (found.experts.num_experts, found.experts.shared_size, found.experts.dense_layers) == (12, 24, (0,))


def test_deepseek_v2_in_the_spelling_of_published_files() -> None:
    """V2 chooses from the best groups by their best expert, V2-Lite from all and makes queries at once."""
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    lite: dict[str, object] = {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": yarn | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "attention_bias": False,
    }
    found = read_hf_config(lite, None)
    assert found.latent == LatentAttention(query_rank=0, latent_rank=512, shared_dim=64, value_dim=128, bias=False)
    assert (found.head_dim, found.rope.interleaved, found.rope.attention_factor) == (192, True, 1.0)
    assert found.attention_scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert found.experts is not None and found.experts.num_groups == 1
    groups = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "q_lora_rank": 1536}
    experts = read_hf_config(lite | groups | {"routed_scaling_factor": 16.0}, None).experts
    assert experts is not None and (experts.num_groups, experts.num_chosen_groups) == (8, 3)
    assert (experts.best_of_group, experts.renormalise, experts.scale, experts.shared_size) == (1, False, 16.0, 2816)
    for wrong, message in (
        ({"topk_method": "noaux_tc"}, "topk_method must be 'greedy' or 'group_limited_greedy', not 'noaux_tc'"),
        ({"norm_topk_prob": True}, "norm_topk_prob must be False, not True"),
        ({"mlp_bias": True}, "mlp_bias must be False, not True"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_hf_config(lite | wrong, None)


def test_layers_with_experts() -> None:
    """All but every second, and those that are listed."""
    file: dict[str, object] = {"model_type": "qwen3_moe", "num_hidden_layers": 5, "decoder_sparse_step": 2}
    file |= {"vocab_size": 9, "hidden_size": 64, "intermediate_size": 8, "max_position_embeddings": 64}
    found = read_hf_config(file | {"num_attention_heads": 4, "mlp_only_layers": [3]}, None).experts
    assert found is not None
    assert (found.dense_layers, found.num_experts, found.num_chosen, found.shared_size) == ((0, 2, 3, 4), 128, 8, 0)
    assert (found.router, found.renormalise, found.choice_bias) == ("softmax", False, False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most 8, the number of experts, not 9"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": ["a"]}, "mlp_only_layers must be a list of layers"),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, "use_sliding_window must be False, not True"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv must be None"),
        ({"model_type": "minimax_m2", "shared_intermediate_size": 64}, "shared_intermediate_size must be 0, not 64"),
    ],
)
def test_refusals_of_other_mixtures(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_hf_config(LLAMA | {"model_type": "mixtral"} | overrides, None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n_group": 5}, "12 experts do not make 5 groups of 2 or more"),
        ({"n_group": 12}, "12 experts do not make 12 groups of 2 or more"),
        ({"topk_group": 5}, "3 experts cannot be chosen from 5 of 4 groups of 3"),
        ({"num_experts_per_tok": 7}, "7 experts cannot be chosen from 2 of 4 groups of 3"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be 4, the number of query heads, not 2"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', not 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc', not 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1, not 2"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be"),
        ({"qk_rope_head_dim": 7}, "odd"),
        ({"n_shared_experts": 0}, "n_shared_experts must be a positive integer"),
    ],
)
def test_refusals_name_the_key(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_hf_config(DeepseekV3Config(**SMALL).to_dict() | overrides, None)
