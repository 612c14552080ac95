"""What differs between one file of a family of text models and another, drawn: a function for each family that has
something of its own, for the table in `tests/family_cases.py`."""

import random
from collections.abc import Callable

Overrides = dict[str, object]
Draw = Callable[[random.Random], Overrides]
WINDOWS = (5, 9, 16)
SLIDING = ("sliding_attention", "full_attention")
LAYERS = 3


def rope(draw: random.Random) -> Overrides:
    """One of the kinds that every family may have."""
    extension: Overrides = {"factor": 4.0, "original_max_position_embeddings": 32}
    kinds: dict[str, Overrides] = {
        "default": {},
        "linear": {"factor": 4.0},
        "llama3": extension | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": extension,
    }
    kind = draw.choice(list(kinds))
    return {"rope_type": kind, "rope_theta": draw.choice((300.0, 10000.0)), **kinds[kind]}


def layer_types(draw: random.Random) -> Overrides:
    return {"sliding_window": draw.choice(WINDOWS), "layer_types": [draw.choice(SLIDING) for _ in range(LAYERS)]}


def two_ropes(draw: random.Random) -> Overrides:
    local = {"rope_type": "default", "rope_theta": 500.0}
    return {"rope_parameters": {"full_attention": rope(draw), "sliding_attention": local}}


def plain(draw: random.Random) -> Overrides:
    return {
        "num_key_value_heads": draw.choice((1, 2, 4)),
        "head_dim": draw.choice((8, 16, 32)),
        "tie_word_embeddings": draw.choice((False, True)),
        "rope_parameters": rope(draw),
    }


def biases(draw: random.Random) -> Overrides:
    return {"attention_bias": draw.choice((False, True)), "mlp_bias": draw.choice((False, True))}


def cohere(draw: random.Random) -> Overrides:
    return {"head_dim": None, "logit_scale": 0.25, "layer_norm_eps": 1e-5, "attention_bias": draw.choice((False, True))}


def gemma2(draw: random.Random) -> Overrides:
    caps = {"attn_logit_softcapping": draw.choice((1.0, 3.0)), "final_logit_softcapping": draw.choice((1.0, 2.0))}
    return layer_types(draw) | caps | {"query_pre_attn_scalar": draw.choice((16, 20))}


def glm(draw: random.Random) -> Overrides:
    parameters = rope(draw) | {"partial_rotary_factor": draw.choice((0.5, 1.0))}
    return {"rope_parameters": parameters, "attention_bias": draw.choice((False, True))}


def granite(draw: random.Random) -> Overrides:
    factors = {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "logits_scaling": 2.5}
    return {"head_dim": None, "residual_multiplier": draw.choice((0.3, 1.0)), **factors} | biases(draw)


def olmo2(draw: random.Random) -> Overrides:
    # ranks may not share a head that is normalised with others
    return {"head_dim": None, "num_key_value_heads": draw.choice((2, 4)), "attention_bias": draw.choice((False, True))}


def olmo3(draw: random.Random) -> Overrides:
    return olmo2(draw) | layer_types(draw) | two_ropes(draw)


def phi3(draw: random.Random) -> Overrides:
    """LongRoPE with sequences that are all longer than the original length, or all shorter."""
    share, pairs = draw.choice(((1.0, 8), (0.5, 4)))
    parameters: Overrides = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    original = draw.choice((16, 16, 256))
    if draw.random() < 0.8:
        lists = {name: [draw.uniform(1, 9) for _ in range(pairs)] for name in ("short_factor", "long_factor")}
        parameters |= {"rope_type": "longrope", "original_max_position_embeddings": original, **lists}
    return {
        "head_dim": None,
        "sliding_window": draw.choice((None, 9)),
        "original_max_position_embeddings": original,
        "rope_parameters": parameters,
    }


def smollm3(draw: random.Random) -> Overrides:
    return {"no_rope_layers": [draw.choice((0, 1)) for _ in range(LAYERS)]} | biases(draw)


def exaone4(draw: random.Random) -> Overrides:
    return draw.choice((layer_types(draw), {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS}))


def experts(key: str) -> Draw:
    """`key` is the family's for their number."""

    def of_family(draw: random.Random) -> Overrides:
        sizes = {"moe_intermediate_size": draw.choice((8, 24)), "num_experts_per_tok": draw.choice((1, 2, 3))}
        return {key: draw.choice((4, 6))} | sizes

    return of_family


def qwen2_moe(draw: random.Random) -> Overrides:
    dense = {"mlp_only_layers": draw.choice(([], [1])), "decoder_sparse_step": draw.choice((1, 2))}
    shared = {"shared_expert_intermediate_size": draw.choice((8, 40)), "norm_topk_prob": draw.choice((False, True))}
    return dense | shared | {"qkv_bias": draw.choice((False, True))}


def qwen3_moe(draw: random.Random) -> Overrides:
    return qwen2_moe(draw) | {"attention_bias": draw.choice((False, True))}


def ministral3(draw: random.Random) -> Overrides:
    growth = {"llama_4_scaling_beta": draw.choice((0.1, 1.0)), "original_max_position_embeddings": draw.choice((9, 16))}
    mscales = draw.choice(({}, {"mscale": 1.0, "mscale_all_dim": 1.0}))
    rotations = draw.choice((rope(draw), {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0} | mscales))
    return {"sliding_window": draw.choice((None, 9)), "rope_parameters": rotations | growth}


def llama4(draw: random.Random) -> Overrides:
    """Chunks begin at other multiples than blocks and steps; transformers' layers are of the types that rotate."""
    rotated = draw.choice(([1, 0, 1], [0, 1, 1], [1, 1, 1]))
    types = ["chunked_attention" if layer else "full_attention" for layer in rotated]
    attention = {"no_rope_layers": rotated, "layer_types": types, "attention_chunk_size": draw.choice((5, 16, 64))}
    growth = {
        "attn_temperature_tuning": draw.random() < 0.8,
        "floor_scale": draw.choice((4, 9)),
        "attn_scale": 0.5,
    }
    sizes = {"intermediate_size": 24, "intermediate_size_mlp": 96, "use_qk_norm": draw.choice((False, True))}
    moe_layers = draw.choice(({"interleave_moe_layer_step": draw.choice((1, 2))}, {"moe_layers": [0, 2]}))
    kind = {"rope_type": "linear", "factor": 4.0}
    rotations = draw.choice((rope(draw), kind | {"rope_theta": 300.0}))
    while rotations["rope_type"] == "yarn":
        rotations = rope(draw)
    biases = {"attention_bias": draw.choice((False, True)), "rope_parameters": rotations}
    return attention | growth | sizes | moe_layers | biases


def mimo(draw: random.Random) -> Overrides:
    """Heads that two ranks can divide, and a number of channels of which half is rotated."""
    head_dim = draw.choice((16, 32))
    share = {"rope_type": "default", "partial_rotary_factor": draw.choice((0.5, 1.0))}
    ropes = {"full_attention": share | {"rope_theta": 10000.0}, "sliding_attention": share | {"rope_theta": 300.0}}
    heads = {"head_dim": head_dim, "v_head_dim": draw.choice((8, 16)), "num_key_value_heads": 2}
    kinds = {"mlp_layer_types": [draw.choice(("dense", "sparse")), draw.choice(("dense", "sparse")), "sparse"]}
    routing = {"n_group": draw.choice((1, 2)), "topk_group": 1, "num_experts_per_tok": 2}
    weights = {"routed_scaling_factor": draw.choice((None, 1.7)), "norm_topk_prob": draw.choice((False, True))}
    scale = {"attention_value_scale": draw.choice((None, 0.707)), "attention_bias": draw.choice((False, True))}
    types = draw.sample((*SLIDING, draw.choice(SLIDING)), LAYERS)
    windows = {"sliding_window": draw.choice(WINDOWS), "layer_types": types}
    return heads | kinds | routing | weights | scale | windows | {"rope_parameters": ropes}


def mixtral(draw: random.Random) -> Overrides:
    return {"sliding_window": draw.choice((None, 9))}


def olmoe(draw: random.Random) -> Overrides:
    return olmo2(draw) | {"norm_topk_prob": draw.choice((False, True))}


def glm4_moe(draw: random.Random) -> Overrides:
    groups = {"n_group": draw.choice((1, 2)), "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1}
    weights = {"routed_scaling_factor": 1.7, "norm_topk_prob": draw.choice((False, True))}
    dense = {"first_k_dense_replace": draw.choice((0, 1)), "use_qk_norm": draw.choice((False, True))}
    return glm(draw) | groups | weights | dense


def deepseek_v2(draw: random.Random) -> Overrides:
    heads = {"head_dim": None, "num_key_value_heads": 4, "attention_bias": draw.choice((False, True))}
    sizes = {"qk_rope_head_dim": 8, "qk_nope_head_dim": draw.choice((8, 20)), "v_head_dim": draw.choice((12, 40))}
    ranks = {"kv_lora_rank": draw.choice((16, 24)), "q_lora_rank": draw.choice((None, 40))}
    choice = draw.choice(
        ({"topk_method": "greedy"}, {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2})
    )
    mixture = {"n_routed_experts": 6, "n_shared_experts": draw.choice((1, 2)), "routed_scaling_factor": 1.7}
    mscales = draw.choice(({}, {"mscale": 1.0, "mscale_all_dim": 0.7}, {"mscale": 0.7, "mscale_all_dim": 0.7}))
    parameters = rope(draw)
    rotations = {"rope_parameters": parameters | (mscales if parameters["rope_type"] == "yarn" else {})}
    return heads | sizes | ranks | choice | mixture | rotations | {"first_k_dense_replace": draw.choice((0, 1, 2))}


def gpt_oss(draw: random.Random) -> Overrides:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32, "truncate": draw.choice((False, True))}
    rotations = draw.choice((rope(draw), {"rope_type": "yarn", "rope_theta": 10000.0} | yarn))
    limits = {"swiglu_limit": draw.choice((0.05, 0.3, 7.0)), "attention_bias": draw.choice((False, True))}
    return layer_types(draw) | limits | {"rope_parameters": rotations, "tie_word_embeddings": False}


def minimax_m2(draw: random.Random) -> Overrides:
    heads = {"num_key_value_heads": draw.choice((2, 4)), "head_dim": 16}
    return heads | {"rope_parameters": rope(draw) | {"partial_rotary_factor": draw.choice((0.5, 1.0))}}


def hybrid(draw: random.Random) -> Overrides:
    """Layers with states, of more value heads than key heads or as many."""
    types = ["linear_attention", "full_attention", draw.choice(("linear_attention", "full_attention"))]
    key_heads = draw.choice((2, 4))
    return {
        "layer_types": draw.sample(types, LAYERS),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.choice((1, 2)),
        "linear_key_head_dim": draw.choice((8, 16)),
        "linear_value_head_dim": draw.choice((8, 40)),
        "linear_conv_kernel_dim": draw.choice((2, 4)),
        "attention_bias": draw.choice((False, True)),
        "rope_parameters": rope(draw) | {"partial_rotary_factor": draw.choice((0.25, 0.5))},
        "head_dim": 16,
    }


def qwen3_5(draw: random.Random) -> Overrides:
    """Rotations that could count rows and columns of images."""
    found = hybrid(draw)
    parameters = found["rope_parameters"]
    assert isinstance(parameters, dict)
    pairs = int(16 * parameters["partial_rotary_factor"]) // 2
    return found | {"rope_parameters": parameters | {"mrope_section": [pairs - 1, 1, 0], "mrope_interleaved": True}}


def qwen3_next(draw: random.Random) -> Overrides:
    return qwen2_moe(draw) | hybrid(draw)


def kimi_linear(draw: random.Random) -> Overrides:
    kinds = ["linear_attention", "full_attention", draw.choice(("linear_attention", "full_attention"))]
    latent = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": draw.choice((8, 16)), "kv_lora_rank": 24}
    linear = {"linear_num_heads": draw.choice((2, 4)), "linear_head_dim": draw.choice((8, 40))}
    groups = {"n_group": draw.choice((1, 2)), "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1}
    return {
        "layer_types": draw.sample(kinds, LAYERS),
        "mlp_layer_types": ["dense", "sparse", draw.choice(("dense", "sparse"))],
        "q_lora_rank": draw.choice((None, 20)),
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "norm_topk_prob": draw.choice((False, True)),
        "linear_conv_kernel_dim": draw.choice((2, 4)),
        "head_dim": None,
        **latent,
        **linear,
        **groups,
    }
