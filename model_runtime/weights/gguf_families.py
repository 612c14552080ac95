"""Which architectures of GGUF files are read, and as which family: a table of names, not code. Torch-free.

Read by `gguf_config.py` and `gguf_source.py` in the engine process. What llama.cpp's converters write is in
https://github.com/ggml-org/llama.cpp/tree/master/conversion; what its models compute that is in no key is in `fixed`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_file import GgufFile
from model_runtime.weights.gguf_names import AROUND, EXPERTS, FUSED, LATENT, LAYER, Names, after

_SIGMOID = 2
"""Of `expert_gating_func`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """One value of general.architecture."""

    family: str
    """Key of FAMILIES."""
    integers: Names = field(default_factory=dict)
    """Keys under the architecture's name, beyond those of all, that the file must have, and the keys of config.json for
    them."""
    numbers: Names = field(default_factory=dict)
    """The same of numbers that may be absent."""
    flags: Names = field(default_factory=dict)
    """The same of what is true or false."""
    tensors: Names = field(default_factory=dict)
    """Tensors of the first layer that may be absent, and the keys of config.json that say whether they are there."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Keys of config.json that no key of the file tells, or that it may leave out."""
    window: int = 0
    """Of files that do not say."""
    layers_of_wide_heads: int = 0
    """Scores are divided by the root of the hidden size's share of a head in models of so many layers, else by that of
    its channels (Gemma)."""
    whole_pairs: bool = True
    """As in RopeConfig."""
    ends: tuple[str, ...] = ()
    """Tokens that end an output beside those that the metadata names."""
    names: Names = field(default_factory=lambda: LAYER)
    turned: bool = False
    """The rows of a query or key head stand as for rotating neighbours."""
    norm_eps: str = "attention.layer_norm_rms_epsilon"
    variants: "Mapping[tuple[str, int | None], GgufFamily]" = field(default_factory=dict)
    """What a file is instead if a key has a value, or, for None, is there and not 0."""


_COHERE = GgufFamily(family="cohere", numbers={"logit_scale": "logit_scale"}, norm_eps="attention.layer_norm_epsilon")
_GEMMA = GgufFamily(
    family="gemma2",
    numbers={
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    window=4096,
    layers_of_wide_heads=46,
    ends=("<end_of_turn>",),
    names=AROUND,
)
_EXPERTS: Names = MappingProxyType({"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"})
_MANY_EXPERTS: Names = MappingProxyType(
    {
        "expert_count": "num_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_used_count": "num_experts_per_tok",
    }
)
_DEEPSEEK_EXPERTS = GgufFamily(
    family="glm4_moe",
    integers={
        "expert_count": "n_routed_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "expert_used_count": "num_experts_per_tok",
        "leading_dense_block_count": "first_k_dense_replace",
    },
    numbers={
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "expert_weights_scale": "routed_scaling_factor",
    },
    flags={"expert_weights_norm": "norm_topk_prob"},
    tensors={"attn_q_norm.weight": "use_qk_norm"},
    fixed={
        "n_group": 1,
        "norm_topk_prob": False,
        "num_nextn_predict_layers": 0,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
    },
    ends=("<|user|>", "<|observation|>"),
    names={**after(LAYER), **EXPERTS},
)
_DEEPSEEK3 = replace(_DEEPSEEK_EXPERTS, family="deepseek_v3", tensors={}, ends=(), names={**LAYER, **EXPERTS, **LATENT})

ARCHITECTURES: Mapping[str, GgufFamily] = {
    "cohere2": replace(_COHERE, family="cohere2", window=4096),
    "command-r": _COHERE,
    "deepseek2": replace(
        _DEEPSEEK3,
        family="deepseek_v2",
        variants={
            ("expert_gating_func", _SIGMOID): _DEEPSEEK3,
            ("expert_group_count", None): replace(
                _DEEPSEEK3,
                family="deepseek_v2",
                fixed={**_DEEPSEEK3.fixed, "topk_method": "group_limited_greedy"},
            ),
        },
    ),
    "exaone4": GgufFamily(family="exaone4", names=AROUND),
    "gemma2": _GEMMA,
    "gemma3": replace(
        _GEMMA,
        family="gemma3_text",
        numbers={**_GEMMA.numbers, "rope.freq_base_swa": "rope_local_base_freq"},
        fixed={"rope_local_base_freq": 10000.0},
        window=0,
        layers_of_wide_heads=62,
    ),
    "glm4": GgufFamily(
        family="glm4",
        ends=("<|user|>", "<|observation|>"),
        names={
            **LAYER,
            **FUSED,
            "ffn_norm": "post_attention_layernorm",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": _DEEPSEEK_EXPERTS,
    "gpt-oss": GgufFamily(
        family="gpt_oss",
        integers={**_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        window=128,
        names={**after(LAYER), **EXPERTS, "attn_sinks": "self_attn.sinks"},
        whole_pairs=False,
        ends=("<|call|>",),
    ),
    "granite": GgufFamily(
        family="granite",
        numbers={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "logit_scale": "logits_scaling",
            "residual_scale": "residual_multiplier",
        },
        turned=True,
    ),
    "llama": GgufFamily(
        family="llama",
        turned=True,
        variants={
            ("expert_count", None): GgufFamily(
                family="mixtral", integers=_EXPERTS, names={**LAYER, **EXPERTS}, turned=True
            )
        },
    ),
    "olmo2": GgufFamily(
        family="olmo2",
        names=AROUND,
        variants={
            ("attention.sliding_window", None): GgufFamily(
                family="olmo3", numbers={"rope.freq_base_swa": "rope_local_base_freq"}, names=AROUND
            )
        },
    ),
    "olmoe": GgufFamily(family="olmoe", integers=_EXPERTS, fixed={"norm_topk_prob": False}, names={**LAYER, **EXPERTS}),
    "phi3": GgufFamily(family="phi3", ends=("<|end|>",), names={**LAYER, **FUSED}),
    "qwen2": GgufFamily(family="qwen2"),
    "qwen2moe": GgufFamily(
        family="qwen2_moe",
        integers={**_MANY_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        fixed={"norm_topk_prob": False},
        names={**LAYER, **EXPERTS},
    ),
    "qwen3": GgufFamily(family="qwen3"),
    "qwen3moe": GgufFamily(
        family="qwen3_moe",
        integers=_MANY_EXPERTS,
        fixed={"norm_topk_prob": True},
        names={**LAYER, **EXPERTS},
    ),
    "seed_oss": GgufFamily(family="seed_oss", names=after(LAYER)),
    "smollm3": GgufFamily(family="smollm3", fixed={"no_rope_layer_interval": 4}, turned=True),
}
"""By general.architecture. Mistral's and Mixtral's files say llama, Olmo 3's olmo2, Phi-4's phi3, DeepSeek-V3's
deepseek2."""
_IMAGE_SIDES = ("clip", "mmproj")


def gguf_family(file: GgufFile) -> GgufFamily:
    """What a file is. Raises CheckpointError for what is not supported."""
    name, num_files = file.metadata.get("general.architecture"), file.metadata.get("split.count", 1)
    if isinstance(num_files, int) and num_files > 1:
        raise CheckpointError(
            f"{file.path.name} is one of {num_files} files of a model; llama.cpp's llama-gguf-split --merge makes one "
            "of them"
        )
    if name in _IMAGE_SIDES:
        raise CheckpointError(
            f"{file.path.name} is the image side of a model for llama.cpp (general.architecture {name!r}), which is "
            "not read; --mmproj takes a Hugging Face folder"
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path.name}: general.architecture {name!r} is not supported; {', '.join(ARCHITECTURES)} are"
        )
    family = ARCHITECTURES[name]
    for (key, wanted), variant in family.variants.items():
        value = file.metadata.get(f"{name}.{key}", 0)
        if value == wanted or (wanted is None and value):
            return variant
    return family
