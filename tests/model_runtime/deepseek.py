"""The configuration of a small DeepSeek-V3, in transformers' keys, and its experts in ours."""

from model_runtime.config import Experts
from tests.checkpoints import VOCAB_SIZE

SMALL: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 12,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
EXPERTS = Experts(
    first_layer=0,
    num_experts=12,
    num_chosen=3,
    num_groups=4,
    num_chosen_groups=2,
    intermediate_size=8,
    shared_size=8,
    renormalise=True,
    scale=1.7,
)
