"""The embedded model as transformers computes it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from server.embedded import embedded_path


def transformers_model() -> LlamaForCausalLM:
    """transformers' own reader of the same file, computed in float64; the architecture is written out as the model card
    has it."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        names = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(embedded_path()), return_tensors=True, model_to_load=names)["tensors"]
    with no_init_weights():
        model = LlamaForCausalLM._from_config(config).eval()
    missing = model.load_state_dict(tensors, strict=False).missing_keys
    assert missing == ["lm_head.weight"]
    model.tie_weights()
    return model.double()
