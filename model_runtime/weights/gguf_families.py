"""Which architectures of GGUF files are read, and as which family: a table of names, not code. Torch-free.

Read by `gguf_config.py` and `gguf_source.py` in the engine process. What llama.cpp's converters write is in
https://github.com/ggml-org/llama.cpp/tree/master/conversion; what its models compute that is in no key is in `fixed`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

Names = Mapping[str, str]

LAYER: Names = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""What the tensors of a layer are called, in GGUF and in weight tables, unless an architecture says otherwise."""
EXPERTS: Names = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
"""Of mixtures; with braces: all experts in one tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """One value of general.architecture."""

    family: str
    """Key of FAMILIES."""
    integers: Names = field(default_factory=dict)
    """Keys under the architecture's name, beyond those of all, that the file must have, and the keys of config.json for
    them."""
    numbers: Names = field(default_factory=dict)
    """The same of floats that may be absent."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Keys of config.json that no key of the file tells."""
    whole_pairs: bool = True
    """As in RopeConfig."""
    ends: tuple[str, ...] = ()
    """Tokens that end an output beside those that the metadata names."""
    names: Names = field(default_factory=lambda: LAYER)
    turned: bool = False
    """The rows of a query or key head stand as for rotating neighbours."""
    norm_eps: str = "attention.layer_norm_rms_epsilon"


ARCHITECTURES: Mapping[str, GgufFamily] = {
    "command-r": GgufFamily(
        family="cohere",
        numbers={"logit_scale": "logit_scale"},
        norm_eps="attention.layer_norm_epsilon",
    ),
    "gpt-oss": GgufFamily(
        family="gpt_oss",
        integers={
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "expert_used_count": "num_experts_per_tok",
        },
        names={
            **{name: key for name, key in LAYER.items() if name != "ffn_norm"},
            **EXPERTS,
            "attn_sinks": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
        },
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
    "llama": GgufFamily(family="llama", turned=True),
    "qwen2": GgufFamily(family="qwen2"),
    "qwen2moe": GgufFamily(
        family="qwen2_moe",
        integers={
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "expert_used_count": "num_experts_per_tok",
        },
        fixed={"norm_topk_prob": False},
        names={**LAYER, **EXPERTS},
    ),
    "qwen3": GgufFamily(family="qwen3"),
    "qwen3moe": GgufFamily(
        family="qwen3_moe",
        integers={
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_used_count": "num_experts_per_tok",
        },
        fixed={"norm_topk_prob": True},
        names={**LAYER, **EXPERTS},
    ),
    "smollm3": GgufFamily(family="smollm3", fixed={"no_rope_layer_interval": 4}, turned=True),
}
"""By general.architecture. Mistral's files say llama."""
