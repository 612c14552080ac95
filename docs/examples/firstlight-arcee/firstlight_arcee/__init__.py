"""Arcee's models: llamas whose feed-forward block has no gate."""

from firstlight_arcee.block import OWN
from model_runtime.family_package import Family, sizes

FAMILY = Family(
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
    hidden_act="relu2",
    own_feed_forward=OWN,
    sizes=sizes(32000, 2560, 18432, 32, 32, 4096),
    defaults={"eos_token_id": 128001, "rms_norm_eps": 1e-5},
)
