"""Reads the factors and caps of a config.json, and refuses structure that the model's family does not have.

Called by `hf/config.py`, engine and worker processes; does not import torch.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from model_runtime.architecture import ModelConfig
from model_runtime.hf.values import Json, fail, number, value_of
from model_runtime.models.family import Family

STRUCTURAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "attention_chunk_size": (None,),
        "attention_multiplier": (None,),
        "attn_logit_softcapping": (None,),
        "clip_qkv": (None,),
        "embedding_multiplier": (None, 1),
        "final_logit_softcapping": (None,),
        "kv_lora_rank": (None,),
        "logit_scale": (None, 1),
        "logits_scaling": (None, 1),
        "n_routed_experts": (None, 0),
        "no_rope_layers": (None,),
        "num_experts": (None, 0),
        "num_local_experts": (None, 0),
        "query_pre_attn_scalar": (None,),
        "residual_multiplier": (None, 1),
        "use_qk_norm": (None, False),
    }
)
"""Keys that change what some family computes, and the values with which they change nothing. A file of another family
that has them is of a model that is not what it calls itself."""


def refuse_structure(config: Json, family: Family) -> None:
    """Raises CheckpointError for a key that the family does not read and that would change the model."""
    for key, value in family.refused.items():
        if config.get(key) not in (None, value):
            fail(key, config[key], repr(value))
    for key, neutral in STRUCTURAL.items():
        if not family.reads(key) and config.get(key) not in neutral:
            fail(key, config[key], f"{neutral[-1]!r}: this model_type does not have it")


def with_scales(read: ModelConfig, config: Json, family: Family) -> ModelConfig:
    """The same architecture with the factors and caps that the family has; null is none."""
    for key in family.scales:
        if value_of(config, key) is not None:
            read = _with_scale(read, key, number(config, key))
    return read


def _with_scale(read: ModelConfig, key: str, value: float) -> ModelConfig:
    match key:
        case "attention_multiplier":
            return replace(read, attention_scale=value)
        case "attn_logit_softcapping":
            return replace(read, attention_softcap=value)
        case "embedding_multiplier":
            return replace(read, embedding_scale=value)
        case "final_logit_softcapping":
            return replace(read, logit_softcap=value)
        case "logit_scale":
            return replace(read, logit_scale=value)
        case "logits_scaling":
            return replace(read, logit_scale=1.0 / value)
        case "query_pre_attn_scalar":
            return replace(read, attention_scale=value**-0.5)
        case "residual_multiplier":
            return replace(read, residual_scale=value)
    raise AssertionError(f"no meaning of {key}")
