"""How fast a layout can be at most: what a step must read, compute and send, over what a device can. Called by
`choice.py` and `show.py`. Real steps take longer, by as much as kernels and the network are short of their figures.

Legend: T tokens of the step, C hidden size.
"""

from dataclasses import dataclass

from model_runtime.architecture import ModelConfig
from model_runtime.memory.planning import RankNeeds
from server.plan.candidates import Candidate, Fit
from server.plan.devices import Devices

COLLECTIVE_SECONDS = 1e-5
"""That a sum of several devices takes, however little it is."""
ACTIVATION_BYTES = {"cpu": 4, "cuda": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Upper bounds, of all replicas together."""

    prefill: float
    """Tokens of prompts a second."""
    decode: float
    """Tokens written a second, by all sequences at half of their full length."""
    token_seconds: float
    """Between two tokens of a sequence then."""


def rates(candidate: Candidate, devices: Devices, concurrency: int) -> Rates | None:
    """None where memory or arithmetic of the devices is of unknown speed, or the way from the host, if it is taken."""
    if candidate.fit is None or devices.speed.bandwidth is None or devices.speed.flops is None:
        return None
    fit, split = candidate.fit, candidate.split
    if fit.runtime.offload_weights and devices.speed.host_link is None:
        return None
    middle, stages = fit.length // 2, split.stages
    # every stage has a step of its own, with some of the sequences
    tokens = max(1, -(-concurrency // split.replicas) // stages)
    decode = [_seconds(candidate, fit, needs, devices, tokens, middle, tokens) for needs in fit.ranks]
    chunk = fit.scheduler.max_num_batched_tokens
    prefill = [_seconds(candidate, fit, needs, devices, chunk, middle, 1) for needs in fit.ranks]
    return Rates(
        prefill=split.replicas * chunk / max(prefill),
        decode=split.replicas * tokens / max(decode),
        token_seconds=max(decode) * stages,
    )


def _seconds(
    candidate: Candidate, fit: Fit, needs: RankNeeds, devices: Devices, tokens: int, context: int, sequences: int
) -> float:
    """Of a step of so many tokens, with so many keys before each, of so many sequences."""
    speed, split = devices.speed, candidate.split
    assert speed.bandwidth is not None and speed.flops is not None, "rates of devices of unknown speed"
    # ranks on processors share what the machine has
    sharers = split.devices // devices.nodes if devices.kind == "cpu" else 1
    share = 1 / split.context
    read = weights_read(needs, tokens) + sequences * share * keys_read(needs, context)
    computed = tokens * share * (2 * active_numbers(needs) + attention_flops(needs, context))
    # layers are copied from the host while others are computed
    own = max(read / speed.bandwidth, computed / speed.flops, _copying(needs, devices))
    return sharers * own + _sending(candidate, needs, devices, tokens)


def _copying(needs: RankNeeds, devices: Devices) -> float:
    """Seconds in which a step's layers come from host memory."""
    if needs.offload is None:
        return 0.0
    assert devices.speed.host_link is not None, "copies at an unknown rate"
    return needs.offload.copied_bytes / devices.speed.host_link


def _expert_share(config: ModelConfig, tokens: int) -> float:
    """Of a layer's experts, how many a step of so many tokens is expected to need."""
    if config.experts is None:
        return 0.0
    return 1.0 - float(1.0 - config.experts.num_chosen / config.experts.num_experts) ** tokens


def weights_read(needs: RankNeeds, tokens: int) -> float:
    """Bytes of weights that a step reads: all but the embedding, unless it is the output matrix too, and experts that
    nobody chose."""
    config, parts = needs.own, needs.weights.parts
    plain = sum(size for part, size in parts.items() if part not in ("embedding", "experts"))
    tied = parts.get("embedding", 0) if config.tie_word_embeddings and config.has_output else 0
    return plain + tied + parts.get("experts", 0) * _expert_share(config, tokens)


def active_numbers(needs: RankNeeds) -> float:
    """Numbers of matrices that a token is multiplied with; the output matrix as if every token were sampled."""
    config, numbers = needs.own, needs.weights.numbers
    plain = sum(count for part, count in numbers.items() if part not in ("embedding", "experts"))
    tied = numbers.get("embedding", 0) if config.tie_word_embeddings and config.has_output else 0
    chosen = 0.0 if config.experts is None else config.experts.num_chosen / config.experts.num_experts
    return plain + tied + numbers.get("experts", 0) * chosen


def _visible(needs: RankNeeds, context: int) -> list[int]:
    """Keys that a query sees, of each layer of this rank that has some: one with a state has none."""
    own = slice(needs.share.layers.start, needs.share.layers.stop)
    windows, has_state = needs.own.sliding_windows[own], needs.own.delta_layers
    return [
        min(context, window) if window else context
        for window, without in zip(windows, has_state, strict=True)
        if not without
    ]


def keys_read(needs: RankNeeds, context: int) -> float:
    """Bytes of the caches that a query of a sequence reads in all layers of a rank, if it has all of its keys."""
    block_tokens = needs.block_tokens // needs.layout.context_size
    visible = _visible(needs, context)
    return needs.block_bytes / block_tokens / max(1, len(visible)) * sum(visible)


def attention_flops(needs: RankNeeds, context: int) -> float:
    """Of a token's queries with keys and values, or with latent vectors in place of both."""
    return 2.0 * needs.own.num_heads * sum(_channels(needs.own)) * sum(_visible(needs, context))


def _channels(config: ModelConfig) -> tuple[int, int]:
    """Of a query, and of what a head mixes."""
    if config.latent is not None:
        return config.latent.row_width, config.latent.latent_rank
    return config.head_dim, config.head_dim


def _sending(candidate: Candidate, needs: RankNeeds, devices: Devices, tokens: int) -> float:
    """Seconds of exchanges that nothing hides: two sums a layer among ranks that share layers, queries and what was
    found for them among those that share sequences, and hidden states from stage to stage."""
    split, config = candidate.split, needs.own
    row = config.hidden_size * ACTIVATION_BYTES[devices.kind]
    heads = config.num_heads * sum(_channels(config)) * ACTIVATION_BYTES[devices.kind]
    seconds = 0.0
    if split.tensor > 1:
        sent = 2 * (split.tensor - 1) / split.tensor * row * tokens / split.context
        seconds += 2 * config.num_layers * _transfer(devices, sent, split.tensor)
    if split.context > 1:
        sent = (split.context - 1) / split.context * heads * tokens
        seconds += 2 * config.num_layers * _transfer(devices, sent, split.tensor * split.context)
    if split.stages > 1:
        seconds += _transfer(devices, row * tokens, split.devices // split.replicas)
    return seconds


def _transfer(devices: Devices, sent: float, span: int) -> float:
    """Of bytes among neighbouring ranks, which are on several machines if they are more than one has."""
    rate = devices.network if span > devices.count else devices.speed.link
    return COLLECTIVE_SECONDS + (0.0 if rate is None else sent / rate)
