"""config.json in every spelling becomes the same ModelConfig; what is not supported is refused by name."""

import copy
import math

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model_runtime.architecture import RopeConfig
from model_runtime.blocks.rope import inverse_frequencies, rope_table
from model_runtime.hf.config import read_hf_config
from model_runtime.models.families import FAMILIES
from model_runtime.weights.errors import CheckpointError
from tests.checkpoints import SMALL

LLAMA: dict[str, object] = {"model_type": "llama"} | SMALL
MROPE: dict[str, object] = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
STATES = {
    "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
    | {"rope_theta": 10000.0},
}
LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 2.5,
}
"""Latent attention, and a mixture of experts."""
EXTRA: dict[str, dict[str, object]] = {
    "qwen2_vl_text": MROPE,
    "llama4_text": {"intermediate_size_mlp": 96},
    "mimo_v2_flash": {"head_dim": 24, "v_head_dim": 16},
    "qwen3_vl_text": MROPE,
    "qwen3_vl_moe_text": MROPE,
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen3_5_text": STATES,
    "qwen3_5_moe_text": STATES,
    "kimi_linear": LATENT | {"num_hidden_layers": 5, "num_local_experts": 8, "n_shared_experts": 2},
    "deepseek_v2": LATENT
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": LATENT
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
}


def test_minimal_llama_takes_transformers_defaults() -> None:
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = read_hf_config({key: LLAMA[key] for key in (*needed, "model_type", "max_position_embeddings")}, None)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert config.rope == RopeConfig(theta=10000.0, rotary_dim=16)
    assert config.eos_token_ids == (2,)
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias)
    assert (config.qk_norm, config.norm_places) == ("none", "before")
    assert not config.tie_word_embeddings


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() & CONFIG_MAPPING.keys()))
def test_agrees_with_what_transformers_writes_and_assumes(family: str) -> None:
    """What transformers saves reads like the same with every key left out that equals its class's default."""
    config_class: type[PreTrainedConfig] = CONFIG_MAPPING[family]
    full = config_class(**copy.deepcopy(SMALL | EXTRA.get(family, {}))).to_dict()
    defaults = config_class().to_dict()
    kept = ("model_type", *SMALL, *EXTRA.get(family, {}))
    sparse = {key: value for key, value in full.items() if key in kept or value != defaults.get(key)}
    assert read_hf_config(sparse | {"layer_types": None}, None) == read_hf_config(full, None)


def test_both_spellings_of_rope() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    new = LLAMA | {"rope_parameters": scaling | {"rope_theta": 5e5, "rope_type": "llama3"}}
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling | {"rope_type": "llama3"}}
    older = LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}}
    assert read_hf_config(new, None) == read_hf_config(old, None) == read_hf_config(older, None)
    assert read_hf_config(new, None).rope.kind == "llama3"
    assert read_hf_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": None}, None).rope.theta == 5e5


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "truncate": False},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 16, "beta_slow": 2},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": None},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1.5] * 32, "long_factor": [9.0] * 32},
    ],
)
def test_frequencies_equal_transformers(parameters: dict[str, object]) -> None:
    rope = {"rope_theta": 10000.0, "original_max_position_embeddings": 4096} | parameters
    config = LlamaConfig(**(SMALL | {"head_dim": 64, "max_position_embeddings": 8192, "rope_parameters": dict(rope)}))
    expected, attention_factor = ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](config, torch.device("cpu"))
    ours = read_hf_config(config.to_dict(), None).rope
    torch.testing.assert_close(inverse_frequencies(ours, 4096), expected, rtol=1e-6, atol=0)
    assert math.isclose(ours.attention_factor, attention_factor, rel_tol=1e-12)


YARN: dict[str, object] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gpt_oss", {"rope_parameters": {**YARN, "rope_theta": 3e4}}),
        ("gpt_oss", {"rope_scaling": None, "rope_theta": 3e4}),
        ("ministral3", {"rope_parameters": None}),
        ("ministral3", {"rope_scaling": {**YARN, "llama_4_scaling_beta": 1.0}, "rope_theta": 3e4}),
        ("llama", {"rope_scaling": YARN, "rope_theta": 3e4, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
        ("llama", {"rope_parameters": YARN, "original_max_position_embeddings": 512}),
        ("llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.0}}),
    ],
)
def test_frequencies_of_a_file_in_any_spelling(family: str, keys: dict[str, object]) -> None:
    """Nothing of a family's own rope is mixed with the file's."""
    config = SMALL | {"head_dim": 64, "max_position_embeddings": 8192} | keys
    theirs = CONFIG_MAPPING[family](**copy.deepcopy(config))
    expected, attention_factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, torch.device("cpu"))
    ours = read_hf_config({"model_type": family, **config}, None).rope
    torch.testing.assert_close(inverse_frequencies(ours, 8192), expected, rtol=1e-6, atol=0)
    assert math.isclose(ours.attention_factor, attention_factor, rel_tol=1e-12)
    assert (ours.growth and ours.growth.rate) == theirs.rope_parameters.get("llama_4_scaling_beta")


def test_rope_table() -> None:
    rope = RopeConfig(theta=100.0, rotary_dim=4, attention_factor=2.0, divisors=(1.0, 4.0))
    table = rope_table(rope, 8, torch.device("cpu"))
    assert table.cos_PR2.shape == table.sin_PR2.shape == (8, 2)
    assert table.cos_PR2[5].tolist() == pytest.approx([2 * math.cos(5.0), 2 * math.cos(5 * 0.1 / 4)])
    assert table.sin_PR2[5].tolist() == pytest.approx([2 * math.sin(5.0), 2 * math.sin(5 * 0.1 / 4)])


def test_yarn_extends_the_longest_position() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}
    assert read_hf_config(LLAMA | {"rope_parameters": yarn}, None).max_position == 1024
    assert read_hf_config(LLAMA | {"rope_parameters": yarn | {"factor": 0.5}}, None).max_position == 256


def test_windows() -> None:
    def windows(overrides: dict[str, object]) -> tuple[int, ...]:
        return read_hf_config(SMALL | overrides, None).sliding_windows

    assert windows({"model_type": "llama", "sliding_window": 8}) == (0, 0, 0)
    assert windows({"model_type": "mistral", "sliding_window": 8}) == (8, 8, 8)
    assert windows({"model_type": "mistral", "sliding_window": None}) == (0, 0, 0)
    assert windows({"model_type": "mistral"}) == (4096, 4096, 4096)
    qwen: dict[str, object] = {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 2}
    assert windows(qwen) == windows(qwen | {"use_sliding_window": False}) == (0, 0, 0)
    assert windows(qwen | {"use_sliding_window": True}) == (0, 0, 8)
    mixed = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    assert windows(qwen | mixed) == (8, 0, 8)
    unrotated: dict[str, object] = {"model_type": "smollm3", "sliding_window": 8, "no_rope_layers": [1, 0, 1]}
    assert windows(unrotated) == (0, 0, 0)
    assert windows(unrotated | {"use_sliding_window": True}) == (0, 8, 0)
    assert windows(unrotated | mixed | {"use_sliding_window": False}) == (8, 0, 8)


def test_published_gemma_2_has_two_keys_of_its_activation() -> None:
    one = {"model_type": "gemma2", **SMALL, "hidden_activation": "gelu_pytorch_tanh"}
    assert read_hf_config(one | {"hidden_act": "gelu_pytorch_tanh"}, None) == read_hf_config(one, None)


def test_end_tokens() -> None:
    def ends(config: object, generation: dict[str, object] | None) -> tuple[int, ...]:
        return read_hf_config(LLAMA | {"eos_token_id": config}, generation).eos_token_ids

    assert ends(7, None) == ends(7, {}) == ends(7, {"eos_token_id": None}) == (7,)
    assert ends([7, 9], None) == (7, 9)
    assert ends(7, {"eos_token_id": 5}) == (5,)
    assert ends(7, {"eos_token_id": [5, 6]}) == (5, 6)
    assert ends(None, None) == ()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"model_type": "gpt_bigcode"},
            "model_type 'gpt_bigcode' is not supported; supported are cohere, cohere2",
        ),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', not 'gelu'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "this model_type has no stacks of experts"),
        ({"is_causal": False}, "is_causal must be true: attention in both directions is not supported"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope type 'proportional' is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "factor is missing"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor must be 1: this model_type rotates whole heads",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor must be a list of 8 numbers"),
        ({"rope_scaling": {"type": "longrope", "short_mscale": 1.1}}, "short_mscale must be absent"),
        ({"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 1}}, "must be at least 2, not 1"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be None: this model_type does not have it"),
        ({"num_local_experts": 8}, "num_local_experts must be 0: this model_type does not have it, not 8"),
        ({"no_rope_layers": [1, 1, 0]}, "no_rope_layers must be None"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers must be a list of 3 numbers"),
        ({"model_type": "glm", "partial_rotary_factor": 0.2}, "an even number of the 16 channels of a head"),
        ({"model_type": "cohere", "use_qk_norm": True}, "use_qk_norm must be False, not True"),
        ({"model_type": "granite", "residual_multiplier": 0}, "residual_multiplier must be a positive number, not 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 0}}, "truncate must be true or false"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, not 'many'"),
        ({"vocab_size": True}, "vocab_size must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive number"),
        ({"rope_theta": 10**400}, "rope_theta must be at most 1e+30"),
        ({"model_type": "glm", "partial_rotary_factor": 1e308}, "partial_rotary_factor must be at most 1e+30"),
        ({"model_type": "deepseek_v3", **LATENT, "qk_nope_head_dim": 10**400}, "qk_nope_head_dim must be at most"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide among 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"eos_token_id": 259}, "exceed the vocabulary of 259"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked"] * 3}, "layer_types"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": None}, "max_window_layers"),
    ],
)
def test_refusals_name_the_key(overrides: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_hf_config(LLAMA | overrides, None)
    assert words in str(caught.value)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings"])
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        read_hf_config({name: value for name, value in (LLAMA | {"rope_scaling": YARN}).items() if name != key}, None)
