"""Layers of stages: divided so that the slowest stage is as fast as can be; which weights and memory are theirs."""

import random
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch

from model_runtime import opening
from model_runtime.checkpoint import LoadedModel, load_model
from model_runtime.memory.budget import PlanError
from model_runtime.memory.steps import activation_bytes
from model_runtime.ops import load_ops
from model_runtime.share import Part
from model_runtime.stages import balanced, stage_layers
from model_runtime.weights.safetensors_source import FileTensor, read_safetensors
from model_runtime.weights.source import Index
from tests.checkpoints import make_checkpoint
from tests.model_runtime import deepseek
from tests.model_runtime.deepseek import EXPERTS
from tests.model_runtime.memory import MODEL
from tests.model_runtime.paged import DEVICE
from tests.model_runtime.ranks import stage_mesh
from tests.model_runtime.test_share import SMOLLM2


@pytest.mark.parametrize("seed", range(30))
def test_no_division_has_a_faster_slowest_stage(seed: int) -> None:
    random_ = random.Random(seed)
    costs = [random_.randint(1, 9) for _ in range(random_.randint(4, 9))]
    first, size, least = random_.randint(0, 30), random_.randint(1, 3), random_.randint(1, 2)

    def slowest(ends: tuple[int, ...]) -> int:
        stages = [sum(costs[start:end]) for start, end in pairwise((0, *ends))]
        return max(stages[0] + first, *stages)

    every = [
        (*cuts, len(costs)) for cuts in combinations(range(1, len(costs)), size - 1) if (*cuts, len(costs))[0] >= least
    ]
    found = balanced(costs, first, size, least)
    assert found in every and slowest(found) == min(map(slowest, every))


def layers(parts: tuple[Part, ...]) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in parts]


def test_the_first_stage_has_the_output_matrix_and_so_fewer_layers() -> None:
    smollm2 = replace(SMOLLM2, num_layers=30, sliding_windows=(0,) * 30)
    assert layers(stage_layers(smollm2, 1)) == [(0, 30)]
    assert layers(stage_layers(smollm2, 2)) == [(0, 11), (11, 30)]
    assert layers(stage_layers(replace(smollm2, has_output=False), 2)) == [(0, 15), (15, 30)]
    deep = replace(smollm2, num_layers=8, num_deepstack=3)
    assert layers(stage_layers(deep, 6)) == [(0, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8)]
    with pytest.raises(PlanError, match="8 layers, of which the first 3 stay together, cannot be divided among 7 stag"):
        stage_layers(deep, 7)
    with pytest.raises(PlanError, match="30 layers cannot be divided among 31 stages: set pipeline_parallel_size"):
        stage_layers(smollm2, 31)


def test_of_experts_those_count_that_a_token_reads() -> None:
    """The first layer has an ordinary block of as many columns as four experts, of which a token reads three."""
    mixture = replace(
        MODEL,
        intermediate_size=4 * 64,
        num_layers=8,
        sliding_windows=(0,) * 8,
        has_output=False,
        experts=replace(EXPERTS, dense_layers=(0, 1, 2, 3), intermediate_size=64, shared_size=64),
    )
    assert layers(stage_layers(mixture, 2)) == [(0, 4), (4, 8)]


def loaded(folder: Path, num_stages: int) -> list[LoadedModel]:
    ops = load_ops(DEVICE, "reference")
    return [
        load_model(folder, ops, DEVICE, lambda done: None, mesh=stage_mesh(stage, num_stages))
        for stage in range(num_stages)
    ]


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_stages_read_their_own_tensors_and_all_have_every_one(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together bit for bit what one rank has; of each tensor of the file, one stage alone reads it, some head by head,
    but for the last norm, which all have."""
    if family == "deepseek":
        deepseek.make_model({"num_hidden_layers": 4}).save_pretrained(tmp_path)
    else:
        make_checkpoint(tmp_path, family, {"num_hidden_layers": 4}, torch.bfloat16)
    (whole,) = loaded(tmp_path, 1)
    source, read = read_safetensors(tmp_path), list[str]()
    read_into, names = FileTensor.read_into, {id(tensor): key for key, tensor in source.items()}

    def noting(self: FileTensor, index: Index, target: torch.Tensor) -> None:
        key = names[id(self)]
        if not (read and key == read[-1] and key.endswith("kv_b_proj.weight")):
            read.append(key)
        read_into(self, index, target)

    monkeypatch.setattr(FileTensor, "read_into", noting)
    monkeypatch.setattr(opening, "read_safetensors", lambda folder: source)
    stages = loaded(tmp_path, 3)
    assert sorted(read) == sorted([*source, *["model.norm.weight"] * 2])
    assert [len(stage.decoder.layers) for stage in stages] == [1, 1, 2]
    assert sum(stage.weight_bytes for stage in stages) == whole.weight_bytes + 2 * 4 * 64
    for stage in stages:
        assert stage.all_stages_bytes == pytest.approx(whole.weight_bytes, rel=0.02)
        assert (stage.decoder.embedding is None) == (stage.decoder.head is None) == (stage is not stages[0])
    joined = [layer for stage in stages for layer in stage.decoder.layers]
    for mine, alone in zip(joined, whole.decoder.layers, strict=True):
        assert torch.equal(mine.attention_norm_C, alone.attention_norm_C)
        assert torch.equal(mine.attention.output.weight.data, alone.attention.output.weight.data)
        assert type(mine.mlp) is type(alone.mlp)


def test_a_later_stage_needs_no_memory_for_logits(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", {"vocab_size": 5000})
    first, last = (stage.decoder.own for stage in loaded(tmp_path, 2))
    assert (first.num_layers, last.num_layers) == (1, 2)
    assert activation_bytes(first, 10, 8) == 4 * (10 * 64 + 8 * 5000 * 18)
    assert activation_bytes(last, 10, 8) == activation_bytes(last, 10, 0) == activation_bytes(first, 10, 0)
