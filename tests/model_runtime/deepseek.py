"""A small DeepSeek-V3: its configuration in transformers' keys, its experts in ours, and a model with random
weights."""

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from model_runtime.architecture import Experts
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
    dense_layers=(),
    num_experts=12,
    num_chosen=3,
    router="sigmoid",
    choice_bias=True,
    num_groups=4,
    num_chosen_groups=2,
    best_of_group=2,
    intermediate_size=8,
    shared_size=8,
    shared_gate=False,
    renormalise=True,
    scale=1.7,
)


def make_model(overrides: dict[str, object]) -> DeepseekV3ForCausalLM:
    """float32, with weights wide enough that logits and scores differ clearly, and a bias that changes the choice."""
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**(SMALL | overrides))).eval()
    generator = torch.Generator().manual_seed(0)
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
    assert biases
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *biases]:
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return model
