"""The architecture of a decoder, independent of the file it was read from.

Read from a checkpoint in the engine process (`hf_config.py`, `weights/gguf_config.py`). This module does not import
torch.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and its context extensions."""

    theta: float
    rotary_dim: int
    """Leading dimensions of a head that are rotated; even."""
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn's mscale)."""
    divisors: tuple[float, ...] = ()
    """One per rotated pair: divides its frequency (GGUF files carry llama3's scaling this way). Empty: all 1."""
    interleaved: bool = False
    """False: rotate (x[i], x[i + rotary_dim / 2]); True: (x[2i], x[2i + 1])."""
    mrope_sections: tuple[int, ...] = ()
    """M-RoPE (Qwen2-VL, arXiv 2409.12191): how many rotated pairs turn by the temporal, the row and the column position
    of a token; they sum to rotary_dim / 2. Empty: all turn by its position in the sequence."""
    mrope_interleaved: bool = False
    """False: the sections follow each other; True: pairs take the three positions in turn (Qwen3-VL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values are made from a short
    vector a token. Of a head's `head_dim` channels, `rope.rotary_dim` are rotated, in keys the same ones for all heads.
    """

    query_rank: int
    """Length of the vector that queries are made from; 0: from the hidden state itself."""
    latent_rank: int
    value_dim: int
    """Channels of a value head; at most head_dim."""
    bias: bool
    """Whether the projections to the short vectors have biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of a layer's feed-forward block (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

    first_layer: int
    """Layers before this one have an ordinary feed-forward block."""
    num_experts: int
    num_chosen: int
    """Experts that compute a token."""
    num_groups: int
    num_chosen_groups: int
    """Groups of experts that a token's experts are chosen from."""
    intermediate_size: int
    """Of one expert."""
    shared_size: int
    """Intermediate size of the block that computes every token beside the chosen experts."""
    renormalise: bool
    """Whether the weights of the chosen experts are divided by their sum."""
    scale: float
    """Multiplies the weights in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of a decoder, independent of the file it was read from."""

    family: str
    """Key of `models.families.FAMILIES`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    sliding_windows: tuple[int, ...]
    """Per layer: keys a query may see including itself, 0 is all."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    """The output matrix is the embedding."""
    eos_token_ids: tuple[int, ...]
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Of the gate in the feed-forward block."""
    attention_scale: float = 0.0
    """What scores are multiplied with; 0: head_dim ** -0.5."""
    embedding_scale: float = 1.0
    """What the embeddings of tokens are multiplied with; those of images are not."""
    norm_weights_less_one: bool = False
    """The checkpoint holds the weights of RMS norms less 1 (Gemma)."""
    sandwich_norms: bool = False
    """What attention and the feed-forward block give is normalised too, before it is added (Gemma)."""
    local_rope: RopeConfig | None = None
    """Of the layers with a sliding window, where it differs from that of the others."""
    num_deepstack: int = 0
    """Additional features of an image, one for each of the first layers, that are added to the layer's result."""
    image_span: int = 0
    """Embeddings of one image where they must be computed in one step (Gemma 3); 0: they may be cut."""
    has_output: bool = True
    """False: the checkpoint has no output matrix. It can be pooled, and writes nothing."""
    latent: LatentAttention | None = None
    experts: Experts | None = None
    num_draft_layers: int = 0
    """Layers that the checkpoint may have after the last one, for drafts of further tokens; the first of them is used
    by the speculation method mtp."""
    absent_heads: tuple[int, int] = (0, 0)
    """In a rank's part of a model: query heads of the first and of the last group that other ranks have."""

    @property
    def bidirectional_images(self) -> bool:
        """Whether the rows of an image attend to all of its rows, which is why no step may cut it."""
        return self.image_span > 0
