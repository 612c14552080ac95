"""Reads what a config.json says of Kimi K3's language model beyond Kimi Linear's. Called by `hf/config.py` as
`Family.finish` of a row in `models/families_kimi.py`, engine and worker processes; does not import torch."""

from dataclasses import replace

from model_runtime.architecture import ModelConfig
from model_runtime.hf.delta import with_kimi_delta
from model_runtime.hf.values import Json, flag, integer


def with_kimi_k3(read: ModelConfig, config: Json) -> ModelConfig:
    """Raises CheckpointError naming the key that is wrong."""
    read = with_kimi_delta(read, config)
    assert read.latent is not None and read.experts is not None, "Kimi Linear without latent attention or experts"
    return replace(
        read,
        activation="situ",
        depth_group=integer(config, "attn_res_block_size"),
        latent=replace(read.latent, output_gate=flag(config, "mla_use_output_gate")),
        experts=replace(
            read.experts,
            hidden_size=integer(config, "routed_expert_hidden_size"),
            result_norm=flag(config, "latent_moe_use_norm"),
        ),
    )
