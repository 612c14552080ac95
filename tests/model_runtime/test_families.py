"""Random tiny models of every family: logits are transformers' through the paged path, by compiled kernels and plain
torch, in chunks beside others, behind a cached prefix, with two ranks, and by two stages. FAMILY_SEEDS=50 tries more
of them."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from model_runtime.batch import Batch
from model_runtime.blocks.moe import MixtureOfExperts
from model_runtime.caches import Caches
from model_runtime.checkpoint import load_model
from model_runtime.models.decoder import Decoder
from model_runtime.models.families_hybrid import HYBRIDS
from model_runtime.models.layer import EagerLayers
from model_runtime.ops import load_ops
from model_runtime.parallel import ONE_RANK, Mesh, tensor_mesh
from tests.family_cases import DRAWS, make_random_model
from tests.model_runtime.paged import DEVICE, KEPT, PagedRun
from tests.model_runtime.ranks import on_shared_memory, stage_mesh
from tests.model_runtime.test_alignment import random_prompts, reference_logits

SEEDS = int(os.environ.get("FAMILY_SEEDS", "2"))
LENGTHS = (41, 19, 30)
CHUNK, BLOCK, SHARED_BLOCKS = 7, 4, 3
TOLERANCE, STATE_TOLERANCE = 1e-4, 1e-3
"""The latter where layers have states: transformers goes through a text in chunks of 64, which rounds otherwise."""


@dataclass(frozen=True)
class Case:
    folder: Path
    prompts: list[list[int]]
    expected: list[Tensor]
    tolerance: float

    def decoder(self, kernels: str, mesh: Mesh = ONE_RANK) -> Decoder:
        ops = load_ops(DEVICE, kernels)
        return load_model(self.folder, ops, DEVICE, lambda fraction: None, mesh=mesh).decoder


@pytest.fixture(scope="module", params=[(family, seed) for family in DRAWS for seed in range(SEEDS)], ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder, prompts = tmp_path_factory.mktemp("checkpoint"), random_prompts(LENGTHS)
    expected = reference_logits(make_random_model(folder, *request.param), prompts)
    return Case(folder, prompts, expected, STATE_TOLERANCE if request.param[0] in HYBRIDS else TOLERANCE)


def logits(decoder: Decoder, prompts: list[list[int]]) -> list[Tensor]:
    """[tokens, V] of each: chunks side by side in blocks in random order, the last three tokens one by one. Then the
    last prompt again, behind blocks of the first run."""
    run, left = PagedRun(decoder, block_size=BLOCK), dict(enumerate(prompts))
    last, again, known = len(prompts) - 1, len(prompts), SHARED_BLOCKS * BLOCK
    run.marks[last] = known
    parts: dict[int, list[Tensor]] = {index: [] for index in left}
    while left:
        sizes = {index: min(CHUNK, len(rest) - 3) if len(rest) > 3 else 1 for index, rest in left.items()}
        for index, found in run.step({index: rest[: sizes[index]] for index, rest in left.items()}).items():
            parts[index].append(found)
        left = {index: rest[sizes[index] :] for index, rest in left.items() if len(rest) > sizes[index]}
    run.states[again] = KEPT + last
    run.tables[again], run.lengths[again] = run.tables[last][:SHARED_BLOCKS], known
    behind = run.step({again: prompts[last][known:]})[again]
    return [*(torch.cat(found) for found in parts.values()), behind]


def assert_aligned(found: list[Tensor], case: Case) -> None:
    expected = [*case.expected, case.expected[-1][SHARED_BLOCKS * BLOCK :]]
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.std() > 0.1
        assert (ours - theirs).abs().max().item() <= case.tolerance


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_logits_are_those_of_transformers(case: Case, kernels: str) -> None:
    decoder = case.decoder(kernels)
    config = decoder.own
    has_experts = any(isinstance(layer.mlp, MixtureOfExperts) for layer in decoder.layers)
    assert isinstance(decoder.stack, EagerLayers) == (kernels == "reference" or has_experts or any(config.delta_layers))
    assert_aligned(logits(decoder, case.prompts), case)


def test_two_ranks(case: Case) -> None:
    found = on_shared_memory(
        2, lambda collectives: logits(case.decoder("auto", tensor_mesh(collectives)), case.prompts)
    )
    assert_aligned(found[0], case)


class Stages:
    """Two stages of a pipeline in the place of a decoder."""

    def __init__(self, folder: Path) -> None:
        ops = load_ops(DEVICE, "auto")
        self._first, self._last = (
            load_model(folder, ops, DEVICE, lambda fraction: None, mesh=stage_mesh(stage, 2)).decoder
            for stage in range(2)
        )
        self.logits, self._count = self._first.logits, len(self._first.layers)
        self.own = replace(self._first.own, num_layers=self._count + len(self._last.layers))

    def forward(self, batch: Batch, kv: Caches) -> Tensor:
        """[T, C]"""
        x_TC = self._first.forward(batch, kv[: self._count])
        return self._last.forward_from(x_TC, batch, kv[self._count :])


def test_two_stages(case: Case) -> None:
    assert_aligned(logits(cast(Decoder, Stages(case.folder)), case.prompts), case)
