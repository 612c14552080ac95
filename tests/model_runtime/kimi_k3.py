"""A tiny Kimi K3: a checkpoint under the names of published ones, and what it computes, written down in plain torch
after the technical report (arXiv 2607.24653), in float64, token by token where there is a state. transformers does not
have the model."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu, softmax

LAYERS, GROUP, FULL = 6, 2, (2, 4, 6)
"""Full attention in these, counted from 1."""
HEADS, HIDDEN, KDA_DIM, WIDTH = 4, 48, 16, 4
QUERY_RANK, LATENT_RANK, PLAIN, SHARED, VALUE = 24, 20, 12, 8, 14
EXPERTS, CHOSEN, EXPERT_WIDTH, EXPERT_SIZE, NUM_SHARED = 6, 2, 32, 24, 2
VOCAB, LENGTH, EPS = 259, 256, 1e-5
TEXT: dict[str, object] = {
    "model_type": "kimi_linear",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "rms_norm_eps": EPS,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": GROUP,
    "linear_attn_config": {
        "full_attn_layers": [*FULL],
        "kda_layers": [layer for layer in range(1, LAYERS + 1) if layer not in FULL],
        "num_heads": HEADS,
        "head_dim": KDA_DIM,
        "short_conv_kernel_size": WIDTH,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
    "q_lora_rank": QUERY_RANK,
    "kv_lora_rank": LATENT_RANK,
    "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": SHARED,
    "v_head_dim": VALUE,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_experts": EXPERTS,
    "num_experts_per_token": CHOSEN,
    "num_shared_experts": NUM_SHARED,
    "moe_intermediate_size": EXPERT_SIZE,
    "routed_expert_hidden_size": EXPERT_WIDTH,
    "latent_moe_use_norm": True,
    "first_k_dense_replace": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.3,
    "model_max_length": LENGTH,
}
CONFIG: dict[str, object] = {"model_type": "kimi_k3", "text_config": TEXT, "eos_token_id": 2, "dtype": "float32"}


def shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    """Of the language model's tensors, by what follows `language_model.`"""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, HIDDEN),
        "lm_head.weight": (vocab, HIDDEN),
    }
    found |= {"model.norm.weight": (HIDDEN,)} | _mixture("model.output_attn_res")
    for layer in range(LAYERS):
        key = f"model.layers.{layer}"
        found |= {f"{key}.{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        found |= _mixture(f"{key}.self_attention_res") | _mixture(f"{key}.mlp_res")
        found |= _attention(f"{key}.self_attn") if layer + 1 in FULL else _kda(f"{key}.self_attn")
        found |= _experts(f"{key}.block_sparse_moe") if layer else _gated(f"{key}.mlp", 40)
    return found


def _mixture(key: str) -> dict[str, tuple[int, ...]]:
    return {f"{key}_norm.weight": (HIDDEN,), f"{key}_proj.weight": (1, HIDDEN)}


def _kda(key: str) -> dict[str, tuple[int, ...]]:
    size = HEADS * KDA_DIM
    found: dict[str, tuple[int, ...]] = {f"{key}.{part}_proj.weight": (size, HIDDEN) for part in "qkvg"}
    found |= {f"{key}.{part}_conv1d.weight": (size, 1, WIDTH) for part in "qkv"}
    found |= {f"{key}.f_a_proj.weight": (KDA_DIM, HIDDEN), f"{key}.f_b_proj.weight": (size, KDA_DIM)}
    found |= {f"{key}.b_proj.weight": (HEADS, HIDDEN), f"{key}.A_log": (HEADS + 4,), f"{key}.dt_bias": (size,)}
    return found | {f"{key}.o_norm.weight": (KDA_DIM,), f"{key}.o_proj.weight": (HIDDEN, size)}


def _attention(key: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{key}.q_a_proj.weight": (QUERY_RANK, HIDDEN),
        f"{key}.q_a_layernorm.weight": (QUERY_RANK,),
        f"{key}.q_b_proj.weight": (HEADS * (PLAIN + SHARED), QUERY_RANK),
        f"{key}.kv_a_proj_with_mqa.weight": (LATENT_RANK + SHARED, HIDDEN),
        f"{key}.kv_a_layernorm.weight": (LATENT_RANK,),
        f"{key}.kv_b_proj.weight": (HEADS * (PLAIN + VALUE), LATENT_RANK),
        f"{key}.g_proj.weight": (HEADS * VALUE, HIDDEN),
        f"{key}.o_proj.weight": (HIDDEN, HEADS * VALUE),
    }


def _gated(key: str, size: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {f"{key}.{part}_proj.weight": (size, HIDDEN) for part in ("gate", "up")}
    return found | {f"{key}.down_proj.weight": (HIDDEN, size)}


def _experts(key: str) -> dict[str, tuple[int, ...]]:
    found = _gated(f"{key}.shared_experts", NUM_SHARED * EXPERT_SIZE)
    found |= {f"{key}.gate.weight": (EXPERTS, HIDDEN), f"{key}.gate.e_score_correction_bias": (EXPERTS,)}
    found |= {f"{key}.routed_expert_down_proj.weight": (EXPERT_WIDTH, HIDDEN)}
    found |= {f"{key}.routed_expert_up_proj.weight": (HIDDEN, EXPERT_WIDTH)}
    found |= {f"{key}.routed_expert_norm.weight": (EXPERT_WIDTH,)}
    for expert in range(EXPERTS):
        found |= {f"{key}.experts.{expert}.{part}.weight": (EXPERT_SIZE, EXPERT_WIDTH) for part in ("w1", "w3")}
        found |= {f"{key}.experts.{expert}.w2.weight": (EXPERT_WIDTH, EXPERT_SIZE)}
    return found


def write_checkpoint(
    folder: Path, seed: int = 0, *, vocab: int = VOCAB, length: int = LENGTH, eos: int = 2
) -> dict[str, Tensor]:
    """With a tensor of an image tower, which nobody reads; gives the language model's."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for key, shape in shapes(vocab).items():
        is_norm = "norm" in key
        tensors[key] = torch.randn(shape, generator=generator) * 0.2 + (1.0 if is_norm else 0.0)
        if key.endswith("A_log"):
            tensors[key][HEADS:] = 0
    stored = {f"language_model.{key}": tensor for key, tensor in tensors.items()}
    save_file(stored | {"vision_tower.patch_embed.proj.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    text = TEXT | {"vocab_size": vocab, "model_max_length": length}
    config = CONFIG | {"text_config": text, "eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


class Reference:
    """What the model computes of one text."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = {key: tensor.double() for key, tensor in tensors.items()}

    def logits(self, tokens: list[int]) -> Tensor:
        """[T, VOCAB]"""
        stream, bank = self("model.embed_tokens")[tokens], list[Tensor]()
        for layer in range(LAYERS):
            key = f"model.layers.{layer}"
            x = self.mixture(f"{key}.self_attention_res", [*bank, stream]) if bank else stream
            if layer % GROUP == 0:
                bank, stream = [*bank, stream], torch.zeros_like(stream)
            x = self.norm(f"{key}.input_layernorm", x)
            attention = self.attention if layer + 1 in FULL else self.kda
            stream = stream + attention(f"{key}.self_attn", x)
            x = self.norm(f"{key}.post_attention_layernorm", self.mixture(f"{key}.mlp_res", [*bank, stream]))
            stream = stream + (self.experts(f"{key}.block_sparse_moe", x) if layer else self.gated(f"{key}.mlp", x))
        last = self.norm("model.norm", self.mixture("model.output_attn_res", [*bank, stream]))
        return linear(last, self("lm_head"))

    def __call__(self, key: str) -> Tensor:
        return self._tensors[key if key in self._tensors else f"{key}.weight"]

    def norm(self, key: str, x: Tensor, eps: float = EPS) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self(key)

    def mixture(self, key: str, sums: list[Tensor]) -> Tensor:
        """Scores of normalised sums, a softmax over them, and the sums as they are."""
        stacked = torch.stack(sums)
        scores = (self.norm(f"{key}_norm", stacked) * self(f"{key}_proj")[0]).sum(-1)
        return (softmax(scores, dim=0)[..., None] * stacked).sum(0)

    def situ(self, gate: Tensor, up: Tensor) -> Tensor:
        return 4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh()

    def gated(self, key: str, x: Tensor, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Tensor:
        gate, up, down = (self(f"{key}.{name}") for name in names)
        return linear(self.situ(linear(x, gate), linear(x, up)), down)

    def experts(self, key: str, x: Tensor) -> Tensor:
        scores = linear(x, self(f"{key}.gate")).sigmoid()
        chosen = (scores + self(f"{key}.gate.e_score_correction_bias")).topk(CHOSEN).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True) * 1.3
        narrow = linear(x, self(f"{key}.routed_expert_down_proj"))
        total = torch.zeros_like(narrow)
        for token, (experts, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
            for expert, share in zip(experts, shares, strict=True):
                total[token] += share * self.gated(f"{key}.experts.{expert}", narrow[token], ("w1", "w3", "w2"))
        routed = linear(self.norm(f"{key}.routed_expert_norm", total), self(f"{key}.routed_expert_up_proj"))
        return routed + self.gated(f"{key}.shared_experts", x)

    def attention(self, key: str, x: Tensor) -> Tensor:
        """Keys and values of every head are made first; no positions."""
        query = self.norm(f"{key}.q_a_layernorm", linear(x, self(f"{key}.q_a_proj")), 1e-6)
        query = linear(query, self(f"{key}.q_b_proj")).view(len(x), HEADS, -1)
        latent, shared = linear(x, self(f"{key}.kv_a_proj_with_mqa")).split([LATENT_RANK, SHARED], dim=1)
        made = linear(self.norm(f"{key}.kv_a_layernorm", latent, 1e-6), self(f"{key}.kv_b_proj"))
        plain, value = made.view(len(x), HEADS, -1).split([PLAIN, VALUE], dim=2)
        keys = torch.cat((plain, shared[:, None].expand(-1, HEADS, -1)), dim=2)
        scores = torch.einsum("qhd,khd->hqk", query, keys) / math.sqrt(PLAIN + SHARED)
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        mixed = torch.einsum("hqk,khv->qhv", softmax(scores, -1), value).flatten(1)
        return linear(mixed * linear(x, self(f"{key}.g_proj")).sigmoid(), self(f"{key}.o_proj"))

    def kda(self, key: str, x: Tensor) -> Tensor:
        """Kimi Delta Attention with a lower bound of decays, and a gate of full rank."""
        query, keys, value = (self.convolved(key, part, x).view(len(x), HEADS, KDA_DIM) for part in "qkv")
        query, keys = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (query, keys))
        made = linear(linear(x, self(f"{key}.f_a_proj")), self(f"{key}.f_b_proj")) + self(f"{key}.dt_bias")
        rate = self(f"{key}.A_log")[:HEADS].exp()[:, None]
        decay = (-5 * (rate * made.view(len(x), HEADS, KDA_DIM)).sigmoid()).exp()
        beta = linear(x, self(f"{key}.b_proj")).sigmoid()
        state, rows = torch.zeros(HEADS, KDA_DIM, KDA_DIM, dtype=torch.float64), []
        for t in range(len(x)):
            state = state * decay[t][..., None]
            error = value[t] - torch.einsum("hk,hkv->hv", keys[t], state)
            state = state + torch.einsum("hk,hv->hkv", keys[t], error * beta[t][:, None])
            rows.append(torch.einsum("hk,hkv->hv", query[t] * KDA_DIM**-0.5, state))
        gate = linear(x, self(f"{key}.g_proj")).sigmoid()
        return linear(self.norm(f"{key}.o_norm", torch.stack(rows)).flatten(1) * gate, self(f"{key}.o_proj"))

    def convolved(self, key: str, part: str, x: Tensor) -> Tensor:
        """Of each channel, the last inputs."""
        made = torch.nn.functional.pad(linear(x, self(f"{key}.{part}_proj")), (0, 0, WIDTH - 1, 0))
        kernel = self(f"{key}.{part}_conv1d")[:, 0]
        return silu(torch.stack([(made[t : t + WIDTH] * kernel.T).sum(0) for t in range(len(x))]))


EVERY_FOURTH = [*range(4, 93, 4), 93]
PUBLISHED: dict[str, object] = {
    "model_type": "kimi_k3",
    "eos_token_id": 163586,
    "text_config": TEXT
    | {
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "attn_res_block_size": 12,
        "linear_attn_config": {
            "full_attn_layers": EVERY_FOURTH,
            "kda_layers": [layer for layer in range(1, 94) if layer not in EVERY_FOURTH],
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "routed_scaling_factor": 1.0,
        "model_max_length": 1048576,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": [r"re:.*block_sparse_moe\.experts\.\d+\.w[123]$"],
                    "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
                }
            },
        },
    },
}
"""Sizes of the published model; the pattern of targets stands for what its file says, routed experts alone."""
