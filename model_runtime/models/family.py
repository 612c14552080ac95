"""What a family of models is described by: the fields of a row of `families.FAMILIES`. A block that no row can describe
yet is a new field here and in `ModelConfig`.

Read by `hf/config.py` and what it calls, engine and worker processes; does not import torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from model_runtime.architecture import ModelConfig, NormPlaces, QKNorm, Sinks
from model_runtime.own_block import OwnFeedForward

Windows = Literal["none", "all_layers", "all_or_by_type", "by_layer", "by_type", "by_type_or_unrotated"]
Unrotated = Literal["none", "whole_layers", "whole_layers_beside_windows", "listed"]
StackOrder = Literal["alternating", "halves"]
"""Of the rows of gate and up in an expert's one matrix of both."""
Growth = Literal["none", "by_rope", "unrotated_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKeys:
    """How the files of a family describe its mixtures of experts. An empty key: there is no such thing."""

    router: Literal["sigmoid", "softmax"]
    choice_bias: bool = False
    counts: tuple[str, ...] = ("num_experts", "num_local_experts")
    """Keys of the number of experts, of which the first that is there counts; defaults are under the last."""
    size: str = "moe_intermediate_size"
    renormalise: bool | str = "norm_topk_prob"
    groups: Literal["none", "two_best", "by_method"] = "none"
    """Whether experts are chosen from the best groups, as `n_group` and `topk_group` say. two_best: a group is as good
    as its two best experts together; by_method: as its best, if `topk_method` is group_limited_greedy."""
    scale: str = ""
    shared: Literal["none", "one", "by_count", "by_size"] = "none"
    """How large the block beside the experts is. one: like an expert; by_count: `n_shared_experts` of them; by_size:
    `shared_expert_intermediate_size`, with a gate."""
    weigh_input: bool = False
    has_biases: bool = False
    clamp: str = ""
    dense: Literal["none", "first", "by_step", "interleaved", "by_type", "by_type_or_first"] = "none"
    """Layers without experts. first: `first_k_dense_replace` of them; by_step: all but every `decoder_sparse_step`-th,
    and those in `mlp_only_layers`; interleaved: those that are not in `moe_layers`, or all but every
    `interleave_moe_layer_step`-th; by_type: as `mlp_layer_types` says; by_type_or_first: that, unless it is null."""
    dense_size: str = "intermediate_size"
    """Of their feed-forward block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type` of Hugging Face's config.json. A flag is fixed, or a string: the config key that decides it."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    hidden_act: str = "silu"
    """What the key of that name must say; of a Gemma it says nothing."""
    qk_norm: QKNorm = "none"
    qk_norm_key: str = ""
    """A config key that must be true for it."""
    norm_places: NormPlaces = "before"
    is_layer_norm: bool = False
    """Norms of hidden states subtract the mean; their eps is under the key `layer_norm_eps` (Cohere)."""
    windows: Windows = "none"
    """Which layers attend to `sliding_window` keys only. by_type: as `layer_types` says, or all but every
    `sliding_window_pattern`-th. all_or_by_type: as `layer_types` says, or all. by_layer: under `use_sliding_window` as
    `layer_types` says, or from layer `max_window_layers` on. by_type_or_unrotated: as `layer_types` says, or under
    `use_sliding_window` those in which positions do not count."""
    unrotated: Unrotated = "none"
    """Layers in which positions do not count. whole_layers: those without a window; ..._beside_windows: unless
    `sliding_window` is null. listed: those with a 0 in `no_rope_layers`, or every `no_rope_layer_interval`-th."""
    chunks: bool = False
    """Layers that rotate, or those that `layer_types` says, attend within `attention_chunk_size` keys."""
    growth: Growth = "none"
    """Queries that grow with their position. by_rope: by `llama_4_scaling_beta` of the rope's parameters;
    unrotated_layers: by `attn_scale` and `floor_scale`, in these, under `attn_temperature_tuning`."""
    interleaved_rope: bool = False
    partial_rotary: bool = False
    """`partial_rotary_factor` may be less than 1."""
    attention_sinks: Sinks = "none"
    stacked_experts: StackOrder | None = None
    """Files have all experts of a layer in one tensor, in alternating order also in MXFP4 (`weights/stacks.py`)."""
    is_gemma: bool = False
    """Norm weights less 1, embeddings scaled by the root of their size, tanh GELU under the key `hidden_activation`."""
    is_mimo: bool = False
    """MiMo-V2: config.json may have the keys that its publisher uses."""
    is_latent: bool = False
    """DeepSeek-V3: latent attention."""
    experts: ExpertKeys | None = None
    draft_keys: tuple[str, ...] = ()
    """The same of the number of layers for drafts, after the last one."""
    local_rope: bool = False
    """Layers with a sliding window have rope parameters of their own."""
    mrope_sections: tuple[int, int, int] | None = None
    """For models whose rotations count rows and columns of images: the sections of a file that names none."""
    mrope_interleaved: bool = False
    scales: tuple[str, ...] = ()
    """Config keys of factors and caps, which `hf/scales.py` knows."""
    refused: Mapping[str, object] = field(default_factory=dict)
    """Config keys of what is not supported, with the value that they must have if they are there."""
    config_names: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json that other families call otherwise."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of the checkpoint's keys, between dots, that other families call otherwise."""
    unused: str = ""
    """What keys of tensors begin with that are not used."""
    spelling: Callable[[str, int, ModelConfig], Mapping[str, slice]] | None = None
    """(key of a tensor in the file, its rows, architecture) -> the keys of a llama for what is in it, and which rows
    each has, or those of none under an empty key; together all, or nothing, if the tensor is not used. In place of
    `renamed`."""
    finish: Callable[[ModelConfig, Mapping[str, object]], ModelConfig] | None = None
    """(what the row says, config.json with all defaults filled in) -> what it is."""
    own_feed_forward: OwnFeedForward | None = None
    sizes: Mapping[str, object] = field(default_factory=dict)
    """Sizes that the text_config of a vision-language model may leave out."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Values of config keys that a file may leave out, where they differ from hf.config.COMMON_DEFAULTS."""

    def reads(self, key: str) -> bool:
        """Whether the key means something for this family beyond what it means for all."""
        named = (*self.scales, *self.refused, *self.sizes, *self.defaults, self.qk_norm_key)
        return key in named or (self.experts is not None and key in self.experts.counts)


def sizes(vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, positions: int) -> dict[str, int]:
    """As in `Family.sizes`."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
    }
