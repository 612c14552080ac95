"""config.json in every spelling becomes the same ModelConfig; what is not supported is refused by name."""

import copy
import math

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model_runtime.blocks.rope import inverse_frequencies, mrope_axes, rope_table
from model_runtime.config import RopeConfig
from model_runtime.hf_config import read_hf_config
from model_runtime.models.families import FAMILIES
from model_runtime.weights.errors import CheckpointError
from tests.checkpoints import SMALL

LLAMA: dict[str, object] = {"model_type": "llama"} | SMALL
MROPE: dict[str, object] = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
EXTRA: dict[str, dict[str, object]] = {
    "qwen2_vl_text": MROPE,
    "qwen3_vl_text": MROPE,
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    },
}


def test_minimal_llama_takes_transformers_defaults() -> None:
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = read_hf_config({key: LLAMA[key] for key in (*needed, "model_type", "max_position_embeddings")}, None)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert config.rope == RopeConfig(theta=10000.0, rotary_dim=16)
    assert config.eos_token_ids == (2,)
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias or config.qk_norm)
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
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 16, "beta_slow": 2},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": None},
        {"rope_type": "dynamic", "factor": 4.0},
    ],
)
def test_frequencies_equal_transformers(parameters: dict[str, object]) -> None:
    rope = {"rope_theta": 10000.0, "original_max_position_embeddings": 4096} | parameters
    config = LlamaConfig(**(SMALL | {"head_dim": 64, "max_position_embeddings": 8192, "rope_parameters": dict(rope)}))
    expected, attention_factor = ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](config, torch.device("cpu"))
    ours = read_hf_config(config.to_dict(), None).rope
    torch.testing.assert_close(inverse_frequencies(ours), expected, rtol=1e-6, atol=0)
    assert math.isclose(ours.attention_factor, attention_factor, rel_tol=1e-12)


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
        ({"model_type": "gpt_bigcode"}, "model_type 'gpt_bigcode' is not supported; supported are deepseek_v3, gemma3"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', not 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "rope type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "factor is missing"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, not 'many'"),
        ({"vocab_size": True}, "vocab_size must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive number"),
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


TOWER: dict[str, object] = {"vision_config": {"model_type": "clip_vision_model"}}
QWEN_VL: dict[str, object] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "eos_token_id": 151645,
}
PUBLISHED: dict[str, dict[str, object]] = {
    "llava 1.5": {
        **TOWER,
        "model_type": "llava",
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
    },
    "llava 1.6 mistral": {
        **TOWER,
        "model_type": "llava_next",
        "text_config": {
            "model_type": "mistral",
            "max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "vocab_size": 32064,
        },
    },
    "onevision": {
        **TOWER,
        "model_type": "llava_onevision",
        "text_config": {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}
        | {"tie_word_embeddings": True, "vocab_size": 152000, "eos_token_id": 151645},
    },
    "pixtral": {
        "model_type": "llava",
        "vision_config": {"model_type": "pixtral"},
        "text_config": {
            "model_type": "mistral",
            "head_dim": 128,
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "max_position_embeddings": 1024000,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e9,
            "sliding_window": None,
            "vocab_size": 131072,
        },
    },
    "idefics3": {
        "model_type": "idefics3",
        "vision_config": {},
        "text_config": {"model_type": "llama", "vocab_size": 49155, "hidden_size": 2048, "rope_theta": 130000.0}
        | {"max_position_embeddings": 16384, "tie_word_embeddings": True, "eos_token_id": 0},
    },
    "internvl": {"model_type": "internvl", "vision_config": {}, "text_config": {"eos_token_id": 151645}},
    "mistral3": {
        "model_type": "mistral3",
        "vision_config": {"model_type": "pixtral"},
        "text_config": {"head_dim": 128, "hidden_size": 5120, "rope_theta": 1e9, "rms_norm_eps": 1e-5}
        | {"vocab_size": 131072, "sliding_window": None},
    },
    "gemma3": {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "vision_config": {},
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    "qwen2_vl, flat": {"model_type": "qwen2_vl", "vision_config": {}, "tie_word_embeddings": True, **QWEN_VL},
    "qwen2_5_vl, flat": {"model_type": "qwen2_5_vl", "vision_config": {}, **QWEN_VL},
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "vision_config": {},
        "text_config": {"model_type": "qwen2_5_vl", "tie_word_embeddings": True, **QWEN_VL},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "vision_config": {"deepstack_visual_indexes": [5, 11, 17]},
        "tie_word_embeddings": True,
        "text_config": {
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "eos_token_id": 151645,
            "rope_theta": 5000000.0,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        },
    },
}
"""What files on the hub leave out and how they spell the rest."""


def transformers_windows(text: PreTrainedConfig) -> tuple[int, ...]:
    fields = text.to_dict()
    window = fields.get("sliding_window") or 0
    types = fields.get("layer_types") or ["sliding_attention"] * text.num_hidden_layers
    return tuple(window if layer_type == "sliding_attention" else 0 for layer_type in types)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_read_as_transformers_reads_them(name: str) -> None:
    ours = read_hf_config(PUBLISHED[name], None)
    theirs = AutoConfig.for_model(**copy.deepcopy(PUBLISHED[name]))
    text = theirs.text_config
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    sizes = (ours.vocab_size, ours.hidden_size, ours.intermediate_size, ours.num_layers, ours.max_position)
    assert sizes == (
        *(text.vocab_size, text.hidden_size, text.intermediate_size, text.num_hidden_layers),
        text.max_position_embeddings,
    )
    head_dim = text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads
    heads = (ours.num_heads, ours.num_kv_heads, ours.head_dim, ours.rms_norm_eps)
    assert heads == (text.num_attention_heads, text.num_key_value_heads, head_dim, text.rms_norm_eps)
    assert ours.sliding_windows == transformers_windows(text)
    rope = text.rope_parameters.get("full_attention", text.rope_parameters)
    assert (ours.rope.theta, ours.rope.kind) == (rope["rope_theta"], rope["rope_type"])
    assert ours.rope.mrope_sections == tuple(rope.get("mrope_section", ()))
    if name != "gemma3":
        assert list(ours.eos_token_ids) == [text.eos_token_id]


def test_gemma3() -> None:
    config = read_hf_config(PUBLISHED["gemma3"], None)
    assert config.eos_token_ids == (1, 106), "the outer keys are those of the checkpoint"
    assert config.rope == RopeConfig(theta=1e6, rotary_dim=256, kind="linear", factor=8.0)
    assert config.local_rope == RopeConfig(theta=1e4, rotary_dim=256)
    assert config.sliding_windows[:7] == (1024, 1024, 1024, 1024, 1024, 0, 1024)
    assert (config.activation, config.attention_scale, config.embedding_scale) == ("gelu_tanh", 0.0625, 2560**0.5)
    assert config.norm_weights_less_one and config.sandwich_norms and config.qk_norm
    assert (config.bidirectional_images, config.image_span, config.num_deepstack) == (True, 256, 0)


def test_what_the_language_side_must_know_of_images() -> None:
    facts = {
        name: (read.bidirectional_images, read.image_span, read.num_deepstack)
        for name, config in PUBLISHED.items()
        for read in (read_hf_config(config, None),)
    }
    others = {name for name, fact in facts.items() if fact == (False, 0, 0)}
    assert facts.keys() - others == {"gemma3", "qwen3_vl"}
    assert facts["qwen3_vl"] == (False, 0, 3)
    assert read_hf_config(PUBLISHED["qwen3_vl"], None).rope.mrope_interleaved
    assert not read_hf_config(PUBLISHED["qwen2_5_vl"], None).rope.mrope_interleaved


@pytest.mark.parametrize(
    "family", ["llava", "llava_next", "llava_onevision", "internvl", "mistral3", "idefics3", "gemma3"]
)
@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("inner", [None, True, False])
def test_tied_embeddings(family: str, outer: bool | None, inner: bool | None) -> None:
    """Whichever of the two objects says what, the answer is transformers'."""
    text = {} if inner is None else {"tie_word_embeddings": inner}
    config: dict[str, object] = {"model_type": family, "text_config": text}
    config |= {} if outer is None else {"tie_word_embeddings": outer}
    theirs = AutoConfig.for_model(**copy.deepcopy(config)).tie_word_embeddings
    assert read_hf_config(config, None).tie_word_embeddings == theirs


def test_end_tokens_of_vision_models() -> None:
    def ends(outer: object, inner: object, generation: dict[str, object] | None) -> tuple[int, ...]:
        config = {"model_type": "llava", "eos_token_id": outer, "text_config": {"eos_token_id": inner}}
        return read_hf_config(config, generation).eos_token_ids

    assert ends(7, 9, {"eos_token_id": [5, 6]}) == (5, 6)
    assert ends(7, 9, None) == (7,)
    assert ends(None, 9, {}) == (9,)
    assert ends(None, None, None) == ()


def test_mrope_axes() -> None:
    chunked = RopeConfig(theta=1e4, rotary_dim=16, mrope_sections=(2, 3, 3))
    assert mrope_axes(chunked).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    in_turn = RopeConfig(theta=1e4, rotary_dim=16, mrope_sections=(4, 2, 2), mrope_interleaved=True)
    assert mrope_axes(in_turn).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


GEMMA: dict[str, object] = {"model_type": "gemma3_text"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen3_vl_moe", "text_config": {}}, "model_type 'qwen3_vl_moe' is not supported"),
        ({"model_type": "llava", "text_config": {"model_type": "mixtral"}}, "text_config.model_type 'mixtral' is not"),
        ({"model_type": "llava", "text_config": {"model_type": "llava"}}, "text_config.model_type 'llava' is not"),
        ({"model_type": "llava"}, "text_config is missing"),
        ({"model_type": "llava", "text_config": [1]}, "text_config must be an object"),
        ({"model_type": "llava", "text_config": {}, "quantization_config": {}}, "quantization_config is not supported"),
        ({"model_type": "qwen2_vl", "text_config": {"rope_scaling": {"mrope_section": [1, 2]}}}, "three integers"),
        ({"model_type": "qwen2_vl", "text_config": {"rope_scaling": {"mrope_section": [1, 2, 3]}}}, "half of head_dim"),
        (
            {"model_type": "qwen3_vl", "text_config": {"num_hidden_layers": 2}, "vision_config": {}},
            "deepstack_visual_indexes must be a list of at most 2 layers",
        ),
        ({"model_type": "gemma3", "text_config": {}, "mm_tokens_per_image": 0}, "mm_tokens_per_image must be"),
        (SMALL | GEMMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping must be None, not 30.0"),
        (SMALL | GEMMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be None"),
        (SMALL | GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention must be False"),
        (SMALL | GEMMA | {"hidden_activation": "gelu"}, "hidden_activation must be 'gelu_pytorch_tanh', not 'gelu'"),
        (SMALL | GEMMA | {"sliding_window": None}, "sliding_window must be a positive integer"),
        (SMALL | GEMMA | {"rope_parameters": {"rope_type": "default"}}, "full_attention and sliding_attention"),
        (SMALL | GEMMA | {"layer_types": ["full_attention"]}, "layer_types must be 3 of"),
        (SMALL | GEMMA | {"layer_types": [{}, [], 3]}, "layer_types must be 3 of"),
    ],
)
def test_refusals_of_vision_models_and_gemma(config: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_hf_config(config, None)
    assert words in str(caught.value)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings"])
def test_missing_keys_are_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        read_hf_config({name: value for name, value in LLAMA.items() if name != key}, None)
