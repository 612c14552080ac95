"""The architecture of a decoder, independent of the file it was read from.

Read from a checkpoint by `hf/config.py` or `weights/gguf_config.py`, engine and worker processes; does not import
torch.
"""

from dataclasses import dataclass, replace
from typing import Literal

from model_runtime.own_block import OwnFeedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Queries grow with their position (arXiv 2501.19399): one at p is multiplied with
    1 + rate ln(1 + floor((p + offset) / length))."""

    rate: float
    length: int
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv 2104.09864) and its context extensions."""

    theta: float
    rotary_dim: int
    """Leading dimensions of a head that are rotated; even, and 0 where positions do not count."""
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn's mscale)."""
    whole_pairs: bool = True
    """The ends of yarn's ramp are rounded to pairs of channels."""
    divisors: tuple[float, ...] = ()
    """One per rotated pair: divides its frequency (GGUF files carry llama3's scaling this way). Empty: all 1."""
    long_divisors: tuple[float, ...] = ()
    """In place of `divisors` where sequences may be longer than `original_max_position` (LongRoPE, arXiv 2402.13753);
    empty: the same."""
    interleaved: bool = False
    """False: rotate (x[i], x[i + rotary_dim / 2]); True: (x[2i], x[2i + 1])."""
    mrope_sections: tuple[int, ...] = ()
    """M-RoPE (Qwen2-VL, arXiv 2409.12191): how many rotated pairs turn by the temporal, the row and the column position
    of a token; they sum to rotary_dim / 2. Empty: all turn by its position in the sequence."""
    mrope_interleaved: bool = False
    """False: the sections follow each other; True: pairs take the three positions in turn (Qwen3-VL)."""
    growth: QueryGrowth | None = None
    """Of queries, once they are rotated (Ministral 3; Llama 4, where they are not)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values are made from a short
    vector a token. Of a head's `head_dim` channels, the last `shared_dim` are in keys the same ones for all heads.
    """

    query_rank: int
    """Length of the vector that queries are made from; 0: from the hidden state itself."""
    latent_rank: int
    shared_dim: int
    """All of these are rotated, or none."""
    value_dim: int
    """Channels of a value head."""
    bias: bool
    """Whether the projections to the short vectors have biases."""
    output_gate: bool = False
    """The heads' results are multiplied with sigmoids of numbers made from the hidden state (Kimi K3)."""

    @property
    def row_width(self) -> int:
        """Numbers of a token in the cache."""
        return self.latent_rank + self.shared_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """Layers that go through a text with a state of fixed size in place of attention: the gated delta rule
    (arXiv 2412.06464), or Kimi's (arXiv 2510.26692)."""

    layers: tuple[bool, ...]
    """Which layers of the whole model."""
    key_heads: int
    """Of queries too; value heads are a multiple."""
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    """Inputs that one output of the convolution is made of."""
    interleaved: bool = False
    """Queries, keys, values and gates of a key head stand together in the checkpoint's matrices (Qwen3-Next)."""
    decay_rank: int = 0
    """> 0: each channel of a key has its own decay, made of a vector of this length; 0: each value head has one."""
    decay_bound: float = 0.0
    """< 0: logarithms of decays are this times a sigmoid (Kimi K3); 0: they are minus a softplus."""
    gate: Literal["silu", "sigmoid"]
    """The function of the numbers that multiply the normalised result."""
    gate_rank: int = 0
    """> 0: these numbers are made of a vector of this length; 0: of the hidden state at once."""

    @property
    def channels(self) -> int:
        """Of queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of a layer's feed-forward block (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

    dense_layers: tuple[int, ...]
    """Layers that have an ordinary feed-forward block."""
    num_experts: int
    num_chosen: int
    """Experts that compute a token."""
    router: Literal["sigmoid", "softmax"]
    """What makes scores of the router's logits."""
    choice_bias: bool
    """Whether experts are chosen by their scores and a bias each; the scores weigh them without it."""
    num_groups: int
    num_chosen_groups: int
    """Groups of experts that a token's experts are chosen from."""
    best_of_group: int
    """A group is as good as so many of its experts together, the best ones."""
    intermediate_size: int
    """Of one expert."""
    shared_size: int
    """Intermediate size of the block that computes every token beside the chosen experts; 0: there is none."""
    shared_gate: bool
    """Whether a number for each token weighs what that block gives (Qwen2-MoE)."""
    renormalise: bool
    """Whether the weights of the chosen experts are divided by their sum."""
    scale: float
    """Multiplies the weights in the end."""
    hidden_size: int = 0
    """> 0: experts work on vectors of this size, which one matrix makes of hidden states and another takes back from
    the experts' weighted sum; the router and the block beside them take hidden states (Nemotron-H, Kimi K3)."""
    result_norm: bool = False
    """Whether that sum is RMS-normalised before it is taken back (Kimi K3)."""
    weigh_input: bool = False
    """Weights multiply what an expert takes, not what it gives (Llama 4)."""
    bias: bool = False
    """Whether router and experts have biases (GPT-OSS)."""
    clamp: float = 0.0
    """> 0: experts multiply (up + 1) and gate / (1 + exp(-1.702 gate)), gate at most this and up within plus and minus
    this (GPT-OSS); 0: as other feed-forward blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Changes of low rank to matrices of attention (LoRA, arXiv 2106.09685), for requests with images only."""

    rank: int
    scale: float
    """What a change is multiplied with."""
    matrices: tuple[str, ...]
    """Which have one in each layer, by the checkpoint's names."""


GATE_BOUND, UP_BOUND = 4.0, 25.0
"""Of SiTU (`blocks/mlp.py`)."""

NormPlaces = Literal["before", "after", "around", "parallel"]
"""Where a layer normalises: what a block takes; what it gives, before it is added (OLMo 2); both (Gemma); what
attention and the feed-forward block take alike, side by side (Cohere)."""
QKNorm = Literal["none", "head", "row", "rotated"]
"""Queries and keys are RMS-normalised before they are rotated: each head; all heads of a token together (OLMo 2); each
head without weights where a layer rotates it, which is the same after that (Llama 4)."""


Sinks = Literal["none", "layers", "windows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of a decoder, independent of the file it was read from."""

    family: str
    """Key of `models.families.FAMILIES`, or of a package's entry point."""
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
    attention_chunks: tuple[int, ...] = ()
    """Per layer: a query at p sees keys from the last multiple of this on, 0 is all; empty: 0 everywhere."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    """The output matrix is the embedding."""
    eos_token_ids: tuple[int, ...]
    qk_norm: QKNorm = "none"
    activation: Literal["silu", "gelu_tanh", "situ"] = "silu"
    """Of the gate in the feed-forward block; situ bounds the other factor too (`blocks/mlp.py`)."""
    attention_scale: float = 0.0
    """What scores are multiplied with; 0: head_dim ** -0.5."""
    embedding_scale: float = 1.0
    """What the embeddings of tokens are multiplied with; those of images are not."""
    residual_scale: float = 1.0
    """What the results of blocks are multiplied with before they are added (Granite)."""
    logit_scale: float = 1.0
    attention_softcap: float = 0.0
    """Scores s become cap * tanh(s / cap) (Gemma 2, arXiv 2408.00118, section 2); 0: they stay."""
    attention_sinks: Sinks = "none"
    """Each query head has a score of its own beside those of the keys, which no value belongs to: in all layers
    (GPT-OSS), or in those with a sliding window (MiMo-V2)."""
    windowed_kv_heads: int = 0
    """Key/value heads of layers with a sliding window, a multiple of those of the others (MiMo-V2); 0: as many."""
    value_dim: int = 0
    """Channels of a value head, fewer than of a key head (MiMo-V2); 0: as many. In the cache, zeros follow them."""
    value_scale: float = 1.0
    """What values are multiplied with."""
    attention_gate: bool = False
    """What attention makes of a head is multiplied with a sigmoid of numbers behind its query (Qwen3-Next)."""
    logit_softcap: float = 0.0
    """The same of logits."""
    norm: Literal["rms", "layer"] = "rms"
    """Of hidden states; "layer" subtracts the mean first and has no bias (Cohere)."""
    norm_weights_less_one: bool = False
    """The checkpoint holds the weights of norms less 1 (Gemma)."""
    norm_places: NormPlaces = "before"
    other_rope: RopeConfig | None = None
    """Of the layers that `other_rope_layers` names; without rotated channels, if their positions do not count."""
    other_rope_layers: tuple[bool, ...] = ()
    """Per layer; empty if all have the same."""
    num_deepstack: int = 0
    """Additional features of an image, one for each of the first layers, that are added to the layer's result."""
    image_span: int = 0
    """Embeddings of one image where they must be computed in one step (Gemma 3); 0: they may be cut."""
    has_output: bool = True
    """False: the checkpoint has no output matrix. It can be pooled, and writes nothing."""
    depth_group: int = 0
    """> 0: blocks take mixtures of what groups of so many layers came to, in place of their sum (`models/depth.py`)."""
    latent: LatentAttention | None = None
    delta: DeltaRule | None = None
    experts: Experts | None = None
    adapter: Adapter | None = None
    own_feed_forward: OwnFeedForward | None = None
    """In place of the gated block, where a layer has no experts."""
    num_draft_layers: int = 0
    """Layers that the checkpoint may have after the last one, for drafts of further tokens; the first of them is used
    by the speculation method mtp."""
    first_layer: int = 0
    """In a stage's part of a model: which one is its first."""
    absent_heads: tuple[int, int] = (0, 0)
    """In a rank's part of a model: query heads of the first and of the last group that other ranks have."""

    def has_other_rope(self, layer: int) -> bool:
        """Whether it is one of those that `other_rope_layers` names."""
        return bool(self.other_rope_layers) and self.other_rope_layers[layer]

    def rope_of(self, layer: int) -> RopeConfig:
        """The rotations of a layer."""
        return self.other_rope if self.other_rope is not None and self.has_other_rope(layer) else self.rope

    def of_layer(self, layer: int) -> "ModelConfig":
        """With the key/value heads and the sinks of one layer for those of all. Layers for drafts, behind the last one,
        have no windows."""
        has_window = any(self.sliding_windows[layer : layer + 1])
        heads = self.windowed_kv_heads if has_window and self.windowed_kv_heads else self.num_kv_heads
        has_sinks = self.attention_sinks == "layers" or (self.attention_sinks == "windows" and has_window)
        return replace(self, num_kv_heads=heads, windowed_kv_heads=0, attention_sinks="layers" if has_sinks else "none")

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Key/value heads of each layer of this part that has a cache in blocks."""
        paged = [self.first_layer + at for at, has_state in enumerate(self.delta_layers) if not has_state]
        if not self.windowed_kv_heads:
            return (self.num_kv_heads,) * len(paged)
        return tuple(self.of_layer(layer).num_kv_heads for layer in paged)

    @property
    def bidirectional_images(self) -> bool:
        """Whether the rows of an image attend to all of its rows, which is why no step may cut it."""
        return self.image_span > 0

    @property
    def delta_layers(self) -> tuple[bool, ...]:
        """For each layer of this part whether it has a state in place of attention."""
        if self.delta is None:
            return (False,) * self.num_layers
        return self.delta.layers[self.first_layer : self.first_layer + self.num_layers]
