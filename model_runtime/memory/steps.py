"""What a step takes beside weights and caches: its temporary tensors, and those of exchanges between ranks.

Called by `planning.py` before a model is loaded. Arithmetic only, on architectures as wide as a rank's
share; tests compare it with what real steps take.
"""

from model_runtime.architecture import ModelConfig
from model_runtime.config import RuntimeConfig
from scheduler.config import SchedulerConfig

FLOAT_BYTES = 4
EXCHANGED_ROWS = 1024
"""That come to a rank at once to be computed by its experts."""
SAMPLER_FLOATS = 18
"""Floats per logit that sampling takes at its peak where plain torch does it: the logits, a copy with bias and
penalties, probabilities, and the int64 weights, ids, sums and differences of a full sort (top_p on a flat
distribution)."""
SCORE_FLOATS = 3
"""The same of scoring: the logits, those of the rows that are asked for, and their logarithms."""
THREAD_FLOATS = 5
"""For each token of the vocabulary that a thread of compiled sampling takes, beside the logits."""
SCORE_CHUNK = 64
"""Prompt rows whose logits exist at the same time: 64 rows of 49 152 float32 are 12 MiB."""


def step_tokens(config: ModelConfig, scheduler: SchedulerConfig) -> int:
    """The most tokens of a step: as configured, or what an image that must not be cut needs beside the sequences."""
    whole = scheduler.max_num_seqs + config.image_span if config.image_span else 0
    return max(scheduler.max_num_batched_tokens, whole)


def activation_bytes(
    config: ModelConfig, tokens: int, rows: int, sampler_threads: int | None = None, *, gathered: bool = False
) -> int:
    """Peak of temporary tensors in a step of `tokens` tokens of which `rows` are sampled, by so many threads of
    compiled code or by plain torch; of logits that ranks have parts of, if they are `gathered`.

    A layer holds the residual stream, its norm and a block's output, and what its blocks take; all through, the step's
    own table of rotations if the model has M-RoPE. The logits, if there are any, come when the layers are done, with
    the last hidden states still there.
    """
    table = config.rope.rotary_dim if config.rope.mrope_sections else 0
    streams = 3 + _depth_streams(config)
    layer = tokens * (table + streams * config.hidden_size + _block_floats(config))
    head = tokens * config.hidden_size + (
        _logit_floats(config, rows, sampler_threads, gathered=gathered) if config.has_output else 0
    )
    return FLOAT_BYTES * max(layer, head)


def _logit_floats(config: ModelConfig, rows: int, sampler_threads: int | None, *, gathered: bool) -> int:
    """Of sampled rows and what chooses their tokens. Parts are there beside the whole; a cap is put on a copy, by way
    of another."""
    if sampler_threads is None:
        return rows * config.vocab_size * SAMPLER_FLOATS
    copies = 2 if gathered else 3 if config.logit_softcap else 1
    return config.vocab_size * (rows * copies + THREAD_FLOATS * sampler_threads)


def _depth_streams(config: ModelConfig) -> int:
    """The bank of block attention residuals, beside the stream that others have too, and a mixture."""
    return -(-config.num_layers // config.depth_group) + 1 if config.depth_group else 0


def _block_floats(config: ModelConfig) -> int:
    """Of a token, in the two blocks of a layer. The layer program has a place for each, since rows may be in different
    ones; layers that run operation by operation have one block's at a time."""
    blocks = max(_delta_floats(config), _attention_floats(config)), _feed_forward_floats(config)
    is_plain = config.latent is None and config.delta is None and not config.attention_gate
    is_program = is_plain and config.experts is None and config.own_feed_forward is None
    return sum(blocks) if is_program else max(blocks)


def _delta_floats(config: ModelConfig) -> int:
    """Of a token: queries, keys and values before and after the convolution, decays, and of the values' width what the
    rule makes, that normalised, the gate, and its function."""
    rule = config.delta
    if rule is None or not any(config.delta_layers):
        return 0
    decays = rule.value_heads * (rule.key_dim if rule.decay_rank else 1)
    return 2 * rule.channels + 4 * rule.value_heads * rule.value_dim + decays + rule.value_heads


def _attention_floats(config: ModelConfig) -> int:
    """Of a token: fused q, k, v and the mixed heads. Latent attention makes queries from a short vector and its norm,
    and takes them to the space of latents; then there are mixed latents too, and in the end these and values."""
    query = config.num_heads * config.head_dim
    if config.latent is None:
        copies = 2 if config.attention_gate else 1  # with gates among the queries first, then apart
        heads, width = max(config.num_kv_heads, config.windowed_kv_heads), config.head_dim
        plain = copies * (2 * query + 2 * heads * width)
        if not config.value_dim:
            return plain
        # values get the width of keys, and lose it again once they are mixed
        return max(2 * query + heads * (4 * width + config.value_dim), plain + config.num_heads * config.value_dim)
    latent, heads = config.latent, config.num_heads
    wide = heads * latent.row_width
    before = latent.query_rank + max(latent.query_rank, query + wide)
    own_row = latent.row_width + 2 * latent.latent_rank
    mixed, values = heads * latent.latent_rank, heads * latent.value_dim
    return max(before, wide + max(own_row, mixed), mixed + values, 3 * values if latent.output_gate else 0)


def _feed_forward_floats(config: ModelConfig) -> int:
    """Of a token: gate, up and their product. All tokens may choose the same expert, which takes a copy of them and has
    an output of its own."""
    own, columns = config.own_feed_forward, 5 if config.activation == "situ" else 3
    dense = columns * config.intermediate_size if own is None else own.floats(config)
    if config.experts is None:
        return dense
    copies = 2 + (config.experts.num_chosen if config.experts.weigh_input else 0)
    experts = columns * config.experts.intermediate_size + copies * _expert_width(config)
    if config.experts.clamp:  # gate and up, each of them within its limits, and a copy on the way
        experts = max(experts, 5 * config.experts.intermediate_size + (copies - 1) * _expert_width(config))
    return max(
        dense if config.experts.dense_layers else 0,
        columns * config.experts.shared_size,
        experts + 2 * config.experts.hidden_size,
    )


def _expert_width(config: ModelConfig) -> int:
    """Of the rows that experts take and give."""
    assert config.experts is not None, "the architecture has no experts"
    return config.experts.hidden_size or config.hidden_size


def step_bytes(
    config: ModelConfig, runtime: RuntimeConfig, scheduler: SchedulerConfig, sampler_threads: int | None = None
) -> int:
    """Of the largest step; `sampler_threads` as in `activation_bytes`. Prompts may be scored instead of sampled."""
    scored = SCORE_CHUNK if sampler_threads is not None else -(-SCORE_CHUNK * SCORE_FLOATS // SAMPLER_FLOATS)
    rows = max(scheduler.max_sampled_rows, scored)
    tokens, ranks = step_tokens(config, scheduler), runtime.context_parallel_size
    gathered = runtime.tensor_parallel_size > 1
    if ranks == 1:
        return activation_bytes(config, tokens, rows, sampler_threads, gathered=gathered)
    # of each sequence one rank may have up to a block more than the others
    own = min(tokens, -(-tokens // ranks) + scheduler.max_num_seqs * scheduler.block_size)
    own_bytes = activation_bytes(config, own, rows, sampler_threads, gathered=gathered)
    exchange = expert_exchange_bytes(config) if runtime.enable_expert_parallel else 0
    return own_bytes + exchange + shared_attention_bytes(config, tokens, own * ranks)


def score_bytes(config: ModelConfig, runtime: RuntimeConfig, scheduler: SchedulerConfig) -> int:
    """What attention takes for each position of the longest sequence where plain torch computes it: sequence by
    sequence, scores of the step's queries and what they become, keys and values as stored and widened, and who sees
    whom, in bytes. Ranks that share sequences have keys of some positions each."""
    tokens, ranks = step_tokens(config, scheduler), runtime.context_parallel_size
    copies = 3 if ranks > 1 or config.attention_softcap or config.attention_sinks != "none" else 2
    heads = config.num_heads + sum(config.absent_heads)
    kept = 4 * max(config.num_kv_heads, config.windowed_kv_heads) * config.head_dim
    if config.latent is not None:
        kept = 3 * config.latent.row_width
    return FLOAT_BYTES * (copies * heads * tokens + kept + tokens // 4) // ranks


def expert_exchange_bytes(config: ModelConfig) -> int:
    """What experts take that compute rows of other ranks: rows that go and come, twice, and what an expert makes."""
    if config.experts is None:
        return 0
    return FLOAT_BYTES * EXCHANGED_ROWS * (6 * _expert_width(config) + 3 * config.experts.intermediate_size)


def shared_attention_bytes(config: ModelConfig, tokens: int, parts: int) -> int:
    """What attention of a step over the keys of several ranks takes beside: queries of all rows, their states of this
    rank's keys, and `parts` states of its own rows. In the end, all hidden states, as they came and in order."""
    query, value = config.head_dim, config.head_dim
    if config.latent is not None:
        query, value = config.latent.row_width, config.latent.latent_rank
    state = config.num_heads * (value + 2)
    attention = tokens * (config.num_heads * query + state) + parts * state
    return FLOAT_BYTES * max(attention, 2 * tokens * config.hidden_size)
