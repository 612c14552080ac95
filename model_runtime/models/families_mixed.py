"""Families with mixtures of experts whose layers attend in several ways: rows of the same table as `families.py`. Does
not import torch."""

from collections.abc import Mapping

from model_runtime.models.family import ExpertKeys, Family, sizes

MIXED: Mapping[str, Family] = {
    "llama4_text": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="rotated",
        qk_norm_key="use_qk_norm",
        unrotated="listed",
        chunks=True,
        growth="unrotated_layers",
        interleaved_rope=True,
        stacked_experts="halves",
        experts=ExpertKeys(
            router="sigmoid",
            size="intermediate_size",
            renormalise=False,
            weigh_input=True,
            shared="one",
            dense="interleaved",
            dense_size="intermediate_size_mlp",
        ),
        renamed={"feed_forward": "mlp", "router": "gate", "shared_expert": "shared_experts"},
        sizes=sizes(202048, 5120, 8192, 48, 40, 131072) | {"intermediate_size_mlp": 16384},
        defaults={
            "attention_chunk_size": 8192,
            "attn_scale": 0.1,
            "attn_temperature_tuning": True,
            "eos_token_id": 2,
            "floor_scale": 8192,
            "head_dim": 128,
            "interleave_moe_layer_step": 1,
            "moe_layers": None,
            "no_rope_layer_interval": 4,
            "no_rope_layers": None,
            "num_experts_per_tok": 1,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "use_qk_norm": True,
        },
    ),
    "qwen3_vl_moe_text": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm="head",
        mrope_sections=(24, 20, 20),
        mrope_interleaved=True,
        stacked_experts="halves",
        experts=ExpertKeys(router="softmax", renormalise=True, dense="by_step"),
        sizes=sizes(151936, 2048, 5632, 24, 16, 128000),
        defaults={
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 16,
            "num_local_experts": 60,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
    ),
}
