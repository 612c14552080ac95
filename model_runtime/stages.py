"""Which layers each stage of a pipeline has, and what with that each rank has of a model. Arithmetic only; every rank
computes it when it loads. Engine and worker processes.

A stage takes as long as the weights that a step reads in it, so stages are divided by these. The first one also has
the output matrix, and the first layers that take features of images.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from model_runtime.architecture import ModelConfig
from model_runtime.memory.budget import PlanError
from model_runtime.models.layer import layer_table
from model_runtime.share import Part, Share, split, whole_experts_of


def stage_layers(config: ModelConfig, num_stages: int) -> tuple[Part, ...]:
    """The layers of so many stages. Raises PlanError where there are too few."""
    head = config.vocab_size * config.hidden_size if config.has_output else 0
    costs = _costs(config)
    if config.depth_group and num_stages > 1:
        raise PlanError(
            "layers of this model take what groups of earlier layers came to, which stages do not hand on: "
            "leave pipeline_parallel_size out"
        )
    least_first = max(1, config.num_deepstack)
    if config.num_layers < least_first + num_stages - 1:
        kept = f", of which the first {least_first} stay together," if least_first > 1 else ""
        raise PlanError(
            f"{config.num_layers} layers{kept} cannot be divided among {num_stages} stages: "
            "set pipeline_parallel_size to less"
        )
    ends = balanced(costs, head, num_stages, least_first)
    return tuple(Part(start, end, config.num_layers) for start, end in zip((0, *ends), ends, strict=False))


def rank_shares(config: ModelConfig, sizes: tuple[int, ...], *, whole_experts: bool) -> list[Share]:
    """What each rank has of a model, in their order; `sizes` are those of a layout. Raises PlanError where there is not
    enough to divide."""
    tensor_size, context_size, num_stages = sizes
    if whole_experts and tensor_size == 1 < context_size:
        whole = split(config, 1)[0]
        shares = [replace(whole, experts=part) for part in whole_experts_of(config, context_size)]
    else:
        shares = [*split(config, tensor_size, whole_experts=whole_experts)] * context_size
    return [share.of_stage(layers, num_stages) for layers in stage_layers(config, num_stages) for share in shares]


def balanced(costs: Sequence[int], first_cost: int, num_stages: int, least_first: int) -> tuple[int, ...]:
    """One past the last layer of each stage, so that the most that a stage costs is the least possible. The first one
    costs `first_cost` more, and has at least `least_first` layers; others have at least one."""
    sums = [0, *accumulate(costs)]
    last = len(costs)
    # by number of layers that the stages so far have: the most that one of them costs, and where they end
    best: dict[int, tuple[int, tuple[int, ...]]] = {
        end: (first_cost + sums[end], (end,)) for end in range(least_first, last + 1)
    }
    for stage in range(1, num_stages):
        best = {
            end: min(
                (max(most, sums[end] - sums[start]), (*ends, end))
                for start, (most, ends) in best.items()
                if start < end
            )
            for end in range(least_first + stage, last + 1)
        }
    return best[last][1]


@lru_cache(maxsize=8)
def _costs(config: ModelConfig) -> tuple[int, ...]:
    """Of each layer; asked for again for every layout that is planned."""
    return tuple(_numbers_read(config, layer) for layer in range(config.num_layers))


def _numbers_read(config: ModelConfig, layer: int) -> int:
    """Of a layer's matrices, for a token: of its experts, those that are chosen."""
    total = 0
    for parameter in layer_table(config, layer, first_expert_only=True):
        numbers = parameter.rows * (parameter.columns or 0)
        if parameter.expert is not None:
            assert config.experts is not None, "an expert in a model without"
            numbers *= config.experts.num_chosen
        total += numbers
    return total
