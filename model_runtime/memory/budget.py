"""Where the memory goes: the KV pool in what weights, the largest step and images leave of a budget.

Called by `planning.plan_rank` once, engine and worker processes. Arithmetic only: the sizes follow from the
architecture. Those of steps, caches and images are in `memory/steps.py`, `memory/caches.py` and `memory/images.py`.
"""

from dataclasses import dataclass

from model_runtime.architecture import ModelConfig
from model_runtime.config import RuntimeConfig
from model_runtime.memory.caches import state_bytes
from model_runtime.memory.images import ImageMemory
from scheduler.config import SchedulerConfig


class PlanError(Exception):
    """The model does not fit as configured. The message has the numbers and says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """The KV pool that a configuration gives."""

    num_blocks: int
    max_model_len: int


def model_length(config: ModelConfig, runtime: RuntimeConfig) -> int:
    """The longest sequence to serve. Raises PlanError above what the model was made for."""
    if runtime.max_model_len > config.max_position:
        raise PlanError(
            f"max_model_len {runtime.max_model_len} exceeds the {config.max_position} positions of the model"
        )
    return runtime.max_model_len or config.max_position


def size_pool(
    config: ModelConfig,
    runtime: RuntimeConfig,
    scheduler: SchedulerConfig,
    *,
    budget: int,
    weight_bytes: int,
    block_bytes: int,
    step: int,
    position_bytes: int = 0,
    images: ImageMemory | None = None,
) -> PoolSize:
    """How many KV blocks of `block_bytes` to reserve: `num_kv_blocks`, or what the budget leaves, but no more than
    max_num_seqs sequences of full length can use. Tables take `position_bytes` for each position of the longest
    sequence, temporary tensors of the largest step `step`. Raises PlanError where not even one such sequence fits."""
    max_model_len = model_length(config, runtime)
    block_size = scheduler.block_size * runtime.context_parallel_size
    blocks_needed = -(-max_model_len // block_size)
    activations = step if images is None else images.cache + max(step, images.encode)
    states = state_bytes(config) * scheduler.num_states
    room = max(0, budget - weight_bytes - activations - states)
    # layers with states alone, as a stage may have, take no blocks
    affordable = max(0, room - position_bytes * max_model_len) // max(1, block_bytes)
    num_blocks = runtime.num_kv_blocks or min(affordable, blocks_needed * scheduler.max_num_seqs)
    if num_blocks >= blocks_needed:
        return PoolSize(num_blocks=num_blocks, max_model_len=max_model_len)
    option = "num_kv_blocks" if runtime.num_kv_blocks else "memory_budget"
    given = f"{num_blocks}" if runtime.num_kv_blocks else _mb(budget)
    fitting = runtime.num_kv_blocks or room // max(1, block_bytes + position_bytes * block_size)
    largest = fitting * block_size
    needed = weight_bytes + activations + states + blocks_needed * block_bytes + position_bytes * max_model_len
    slots = f", {scheduler.num_states} states {_mb(states)}" if states else ""
    raise PlanError(
        f"one sequence of max_model_len {max_model_len} tokens needs {blocks_needed} KV blocks of {_mb(block_bytes)}, "
        f"with all else {-(-needed // 2**20)} MiB, and there is room for {num_blocks} ({option} {given}, "
        f"weights {_mb(weight_bytes)}, activations {_mb(activations)}{slots}): raise {option}"
        + (f", or set max_model_len to at most {largest}" if largest else "")
    )


def _mb(number: int) -> str:
    return f"{number / 2**20:.4g} MiB"
