"""Where the memory goes: weights, activations of the largest step, images, and the KV pool in what is left.

Called by `executor.load_executor` once, engine process. Arithmetic only: the sizes follow from the architecture, which
takes no time at start, and a test compares them with what a real step takes.
"""

from dataclasses import dataclass

from model_runtime.architecture import ModelConfig
from model_runtime.config import RuntimeConfig
from scheduler.config import SchedulerConfig
from vision.encoder.model import GROUP_PATCHES
from vision.tower_config import PackedConfig, VisionTowerConfig

FLOAT_BYTES = 4
EXCHANGED_ROWS = 1024
"""That come to a rank at once to be computed by its experts."""
SAMPLER_FLOATS = 18
"""Floats per logit that sampling takes at its peak where plain torch does it: the logits, a copy with bias and
penalties, probabilities, and the int64 weights, ids, sums and differences of a full sort (top_p on a flat
distribution). Compiled, it takes about five for each token of the vocabulary and thread beside the logits."""


class PlanError(Exception):
    """The model does not fit as configured. The message has the numbers and says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """The KV pool that a configuration gives."""

    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMemory:
    """Bytes that images take beside the weights."""

    cache: int
    encode: int
    """While one is encoded, which is over before the step's tokens are computed."""


def step_tokens(config: ModelConfig, scheduler: SchedulerConfig) -> int:
    """The most tokens of a step: as configured, or what an image that must not be cut needs beside the sequences."""
    whole = scheduler.max_num_seqs + config.image_span if config.image_span else 0
    return max(scheduler.max_num_batched_tokens, whole)


def activation_bytes(config: ModelConfig, tokens: int, rows: int) -> int:
    """Peak of temporary tensors in a step of `tokens` tokens of which `rows` are sampled.

    A layer holds the residual stream, its norm and a block's output, and what its blocks take; all through, the step's
    own table of rotations if the model has M-RoPE. The logits, if there are any, come when the layers are done, with
    the last hidden states still there.
    """
    table = config.rope.rotary_dim if config.rope.mrope_sections else 0
    layer = tokens * (table + 3 * config.hidden_size + _block_floats(config))
    head = tokens * config.hidden_size + (rows * config.vocab_size * SAMPLER_FLOATS if config.has_output else 0)
    return FLOAT_BYTES * max(layer, head)


def _block_floats(config: ModelConfig) -> int:
    """Of a token, in the two blocks of a layer. The layer program has a place for each, since rows may be in different
    ones; layers that run operation by operation have one block's at a time."""
    blocks = _attention_floats(config), _feed_forward_floats(config)
    return sum(blocks) if config.latent is None and config.experts is None else max(blocks)


def _attention_floats(config: ModelConfig) -> int:
    """Of a token: fused q, k, v and the mixed heads. Latent attention makes queries, then keys and values, from a short
    vector and its norm, before it puts them there."""
    query = config.num_heads * config.head_dim
    if config.latent is None:
        return 2 * query + 2 * config.num_kv_heads * config.head_dim
    latent, rotated = config.latent, config.rope.rotary_dim
    made = config.num_heads * (config.head_dim - rotated + latent.value_dim) + 2 * latent.latent_rank + rotated
    return 3 * query + max(latent.query_rank + max(query, latent.query_rank), made)


def _feed_forward_floats(config: ModelConfig) -> int:
    """Of a token: gate, up and their product. All tokens may choose the same expert, which takes a copy of them and has
    an output of its own."""
    if config.experts is None:
        return 3 * config.intermediate_size
    widest = max(config.intermediate_size, config.experts.shared_size)
    return max(3 * widest, 3 * config.experts.intermediate_size + 2 * config.hidden_size)


def encode_bytes(config: VisionTowerConfig, num_pixels: int) -> int:
    """Peak of temporary tensors while the tower encodes one image of `num_pixels`, or of one tile if that is more.

    The image is there as bytes and, twice, as float32 colours (patches that repeat a frame are twice as large). A block
    holds the tokens of a group of tiles, or of a whole packed image: either the residual stream, its norm, fused q, k
    and v and what attention makes of them, or the stream before and after attention, its norm, and what the
    feed-forward block makes.
    """
    tower, block = config.tower, config.tower.block
    mlp = 4 * block.hidden_size + block.intermediate_size * (5 if block.gated else 2)
    if isinstance(tower, PackedConfig):
        tokens = num_pixels // tower.patch_size**2
        layer = tokens * (max(12 * block.hidden_size, mlp) + 4 * block.head_dim)
        return 3 * num_pixels + FLOAT_BYTES * (2 * tokens * tower.patch_width + layer)
    num_pixels = max(num_pixels, tower.image_size**2)
    tokens = max(tower.grid**2, min(GROUP_PATCHES, num_pixels // tower.patch_size**2))
    layer = tokens * (max(7 * block.hidden_size, mlp) + tower.feature_size)
    return num_pixels * 3 * (1 + 2 * FLOAT_BYTES) + FLOAT_BYTES * layer


def image_pixels(config: VisionTowerConfig, largest: int, least: int, budget: int) -> int:
    """Pixels of the largest image that is encoded: `largest`, unless that takes more than a quarter of the budget, but
    always `least`."""
    wanted = max(largest, least)
    fitting = budget // 4 * wanted // encode_bytes(config, wanted)
    return max(least, min(wanted, fitting))


def rope_bytes(config: ModelConfig) -> int:
    """A cosine and a sine for each rotated pair of channels; at every position, and for each kind of layer."""
    other = 0 if config.other_rope is None else config.other_rope.rotary_dim
    return FLOAT_BYTES * (config.rope.rotary_dim + other)


def model_length(config: ModelConfig, runtime: RuntimeConfig) -> int:
    """The longest sequence to serve. Raises PlanError above what the model was made for."""
    if runtime.max_model_len > config.max_position:
        raise PlanError(
            f"max_model_len {runtime.max_model_len} exceeds the {config.max_position} positions of the model"
        )
    return runtime.max_model_len or config.max_position


def _step_bytes(config: ModelConfig, runtime: RuntimeConfig, scheduler: SchedulerConfig) -> int:
    """Of the largest step."""
    tokens, ranks = step_tokens(config, scheduler), runtime.context_parallel_size
    if ranks == 1:
        return activation_bytes(config, tokens, scheduler.max_sampled_rows)
    # of each sequence one rank may have up to a block more than the others
    own = min(tokens, -(-tokens // ranks) + scheduler.max_num_seqs * scheduler.block_size)
    own_bytes = activation_bytes(config, own, scheduler.max_sampled_rows)
    exchange = expert_exchange_bytes(config) if runtime.enable_expert_parallel else 0
    return own_bytes + exchange + shared_attention_bytes(config, tokens, own * ranks)


def expert_exchange_bytes(config: ModelConfig) -> int:
    """What experts take that compute rows of other ranks: rows that go and come, twice, and what an expert makes."""
    if config.experts is None:
        return 0
    return FLOAT_BYTES * EXCHANGED_ROWS * (6 * config.hidden_size + 3 * config.experts.intermediate_size)


def shared_attention_bytes(config: ModelConfig, tokens: int, parts: int) -> int:
    """What attention of a step over the keys of several ranks takes beside: queries of all rows, their states of this
    rank's keys, and `parts` states of its own rows. In the end, all hidden states, as they came and in order."""
    state = config.num_heads * (config.head_dim + 2)
    attention = tokens * (config.num_heads * config.head_dim + state) + parts * state
    return FLOAT_BYTES * max(attention, 2 * tokens * config.hidden_size)


def size_pool(
    config: ModelConfig,
    runtime: RuntimeConfig,
    scheduler: SchedulerConfig,
    *,
    budget: int,
    weight_bytes: int,
    block_bytes: int,
    position_bytes: int = 0,
    images: ImageMemory | None = None,
) -> PoolSize:
    """How many KV blocks of `block_bytes` to reserve: `num_kv_blocks`, or what the budget leaves, but no more than
    max_num_seqs sequences of full length can use. Tables take `position_bytes` for each position of the longest
    sequence. Raises PlanError where not even one such sequence fits."""
    max_model_len = model_length(config, runtime)
    block_size = scheduler.block_size * runtime.context_parallel_size
    blocks_needed = -(-max_model_len // block_size)
    activations = _step_bytes(config, runtime, scheduler)
    if images is not None:
        activations = images.cache + max(activations, images.encode)
    room = max(0, budget - weight_bytes - activations)
    affordable = max(0, room - position_bytes * max_model_len) // block_bytes
    num_blocks = runtime.num_kv_blocks or min(affordable, blocks_needed * scheduler.max_num_seqs)
    if num_blocks >= blocks_needed:
        return PoolSize(num_blocks=num_blocks, max_model_len=max_model_len)
    option = "num_kv_blocks" if runtime.num_kv_blocks else "memory_budget"
    given = f"{num_blocks}" if runtime.num_kv_blocks else _mb(budget)
    fitting = runtime.num_kv_blocks or room // (block_bytes + position_bytes * block_size)
    largest = fitting * block_size
    raise PlanError(
        f"one sequence of max_model_len {max_model_len} tokens needs {blocks_needed} KV blocks of {_mb(block_bytes)}, "
        f"and there is room for {num_blocks} ({option} {given}, weights {_mb(weight_bytes)}, activations "
        f"{_mb(activations)}): raise {option}" + (f", or set max_model_len to at most {largest}" if largest else "")
    )


def _mb(number: int) -> str:
    return f"{number / 2**20:.4g} MiB"
