"""Reads what a config.json says about mixtures of experts, in the keys of each family, and about layers for drafts.

Called by `hf/config.py`, engine and worker processes; does not import torch.
"""

from dataclasses import replace

from model_runtime.architecture import Experts, ModelConfig
from model_runtime.hf.values import MOST_CHANNELS, MOST_EXPERTS, Json, fail, flag, integer, layer_list, number, value_of
from model_runtime.models.family import ExpertKeys, Family
from model_runtime.weights.errors import CheckpointError


def with_experts(read: ModelConfig, config: Json, family: Family) -> ModelConfig:
    """The same architecture with the mixtures and layers for drafts that the family has.

    `config` has all defaults filled in. Raises CheckpointError naming the key that is wrong or not supported.
    """
    if family.draft_keys:
        key = next((key for key in family.draft_keys if key in config), family.draft_keys[0])
        read = replace(read, num_draft_layers=_from_zero(config, key))
    return read if family.experts is None else replace(read, experts=_experts(config, family.experts, read.num_layers))


def _experts(config: Json, keys: ExpertKeys, num_layers: int) -> Experts:
    num_experts = integer(config, next((key for key in keys.counts if key in config), keys.counts[0]))
    if num_experts * num_layers > MOST_EXPERTS:
        raise CheckpointError(
            f"config.json: {num_layers} layers of {num_experts} experts are more than {MOST_EXPERTS} experts together"
        )
    num_chosen, size = integer(config, "num_experts_per_tok"), integer(config, keys.size)
    best_of_group = _best_of_group(config, keys)
    num_groups, num_chosen_groups = _groups(config, num_experts, num_chosen, best_of_group) if best_of_group else (1, 1)
    if num_chosen > num_experts:
        fail("num_experts_per_tok", num_chosen, f"at most {num_experts}, the number of experts")
    return Experts(
        dense_layers=_dense_layers(config, keys, num_layers),
        num_experts=num_experts,
        num_chosen=num_chosen,
        router=keys.router,
        choice_bias=keys.choice_bias,
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        best_of_group=max(1, best_of_group),
        intermediate_size=size,
        shared_size=_shared_size(config, keys, size),
        shared_gate=keys.shared == "by_size",
        renormalise=flag(config, keys.renormalise),
        scale=number(config, keys.scale) if keys.scale else 1.0,
        bias=keys.has_biases,
        clamp=number(config, keys.clamp) if keys.clamp else 0.0,
        weigh_input=keys.weigh_input,
    )


def _shared_size(config: Json, keys: ExpertKeys, size: int) -> int:
    if keys.shared == "one":
        return size
    if keys.shared == "by_count":
        count = integer(config, "n_shared_experts")
        if size * count > MOST_CHANNELS:
            fail("n_shared_experts", count, f"at most {MOST_CHANNELS // size}, with {size} channels each")
        return size * count
    return integer(config, "shared_expert_intermediate_size") if keys.shared == "by_size" else 0


def _dense_layers(config: Json, keys: ExpertKeys, num_layers: int) -> tuple[int, ...]:
    if keys.dense == "none":
        return ()
    if keys.dense in ("first", "by_type_or_first"):
        first = tuple(range(min(num_layers, _from_zero(config, "first_k_dense_replace"))))
        if keys.dense == "first" or config["mlp_layer_types"] is None:
            return first
    if keys.dense in ("by_type", "by_type_or_first"):
        types = config["mlp_layer_types"]
        known = ("dense", "sparse")
        if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
            fail("mlp_layer_types", types, f"{num_layers} of dense and sparse")
        return tuple(layer for layer, kind in enumerate(types) if kind == "dense")
    if keys.dense == "interleaved":
        step = integer(config, "interleave_moe_layer_step")
        found = range(step - 1, num_layers, step) if config["moe_layers"] is None else layer_list(config, "moe_layers")
        return tuple(layer for layer in range(num_layers) if layer not in found)
    listed, step = layer_list(config, "mlp_only_layers"), integer(config, "decoder_sparse_step")
    return tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)


def _best_of_group(config: Json, keys: ExpertKeys) -> int:
    """How many of its experts make a group good; 0: there are no groups."""
    if keys.groups != "by_method":
        return 2 if keys.groups == "two_best" else 0
    methods = {"greedy": 0, "group_limited_greedy": 1}
    method = value_of(config, "topk_method")
    if not isinstance(method, str) or method not in methods:
        fail("topk_method", method, " or ".join(map(repr, methods)))
    return methods[method]


def _groups(config: Json, num_experts: int, num_chosen: int, least: int) -> tuple[int, int]:
    """(groups, those of them that a token's experts are chosen from); a group has at least so many experts."""
    num_groups, num_chosen_groups = integer(config, "n_group"), integer(config, "topk_group")
    per_group = num_experts // num_groups
    if per_group < least or num_experts % num_groups:
        raise CheckpointError(f"config.json: {num_experts} experts do not make {num_groups} groups of {least} or more")
    if num_chosen_groups > num_groups or num_chosen > num_chosen_groups * per_group:
        raise CheckpointError(
            f"config.json: {num_chosen} experts cannot be chosen from {num_chosen_groups} of {num_groups} groups of "
            f"{per_group}"
        )
    return num_groups, num_chosen_groups


def _from_zero(config: Json, key: str) -> int:
    value = value_of(config, key)
    return 0 if value == 0 and value is not False else integer(config, key)
