"""What tensors of a layer are called in GGUF files, and in Hugging Face's: parts of the table in `gguf_families.py`.
Torch-free.
"""

from collections.abc import Mapping
from types import MappingProxyType

Names = Mapping[str, str]

LAYER: Names = MappingProxyType(
    {
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
)
"""Unless an architecture says otherwise."""
EXPERTS: Names = MappingProxyType(
    {
        "ffn_gate_inp": "mlp.gate",
        "exp_probs_b": "mlp.gate.e_score_correction_bias",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    }
)
"""Of mixtures; with braces: all experts in one tensor."""
FUSED: Names = MappingProxyType({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})
"""Several matrices in one, gate above up."""
LATENT: Names = MappingProxyType(
    {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
    }
)
"""Of latent attention: `kv_b` in older files, `k_b` and `v_b` in newer ones."""


def after(names: Names) -> Names:
    """Where the norm before the feed-forward block is called after the one that stands before it."""
    rest = {name: key for name, key in names.items() if name != "ffn_norm"}
    return MappingProxyType({**rest, "post_attention_norm": "post_attention_layernorm"})


AROUND: Names = MappingProxyType(
    {
        **LAYER,
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
"""With norms of what blocks give, and maybe of what they take."""
