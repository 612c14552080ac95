"""config.json of models with images as the hub publishes them: read as transformers reads it, or refused by name."""

import copy

import pytest
from transformers import AutoConfig, PreTrainedConfig

from model_runtime.architecture import RopeConfig
from model_runtime.blocks.rope import mrope_axes
from model_runtime.hf.config import read_hf_config
from model_runtime.weights.errors import CheckpointError
from tests.checkpoints import SMALL

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
QWEN_STATES: dict[str, object] = {
    "eos_token_id": 248044,
    "num_hidden_layers": 24,
    "full_attention_interval": 4,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
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
    "qwen3_5": {
        "model_type": "qwen3_5",
        "vision_config": {},
        "text_config": {"hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2, **QWEN_STATES},
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "vision_config": {"deepstack_visual_indexes": []},
        "text_config": {"num_experts_per_tok": 8, "intermediate_size": 512, **QWEN_STATES},
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
    assert config.other_rope == RopeConfig(theta=1e4, rotary_dim=256)
    assert config.sliding_windows[:7] == (1024, 1024, 1024, 1024, 1024, 0, 1024)
    assert (config.activation, config.attention_scale, config.embedding_scale) == ("gelu_tanh", 0.0625, 2560**0.5)
    assert config.other_rope_layers[:7] == (True, True, True, True, True, False, True)
    assert config.norm_weights_less_one and (config.norm_places, config.qk_norm) == ("around", "head")
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
        ({"model_type": "qwen9_vl", "text_config": {}}, "model_type 'qwen9_vl' is not supported"),
        ({"model_type": "llava", "text_config": {"model_type": "mamba"}}, "text_config.model_type 'mamba' is not"),
        ({"model_type": "llava", "text_config": {"model_type": "llava"}}, "text_config.model_type 'llava' is not"),
        ({"model_type": "llava"}, "text_config is missing"),
        ({"model_type": "llava", "text_config": [1]}, "text_config must be an object"),
        ({"model_type": "llava", "text_config": {}, "quantization_config": {}}, "quantization_config.quant_method"),
        ({"model_type": "qwen2_vl", "text_config": {"rope_scaling": {"mrope_section": [1, 2]}}}, "three integers"),
        (
            {"model_type": "qwen2_vl", "text_config": {"rope_scaling": {"mrope_section": [1, 2, 3]}}},
            "half of the 128 rotated channels",
        ),
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
