"""The configuration of DeepSeek-V3 and its kin: every spelling is read, what is not supported is refused by name."""

import math

import pytest
from transformers import DeepseekV3Config

from model_runtime.architecture import LatentAttention
from model_runtime.hf_config import read_hf_config
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
