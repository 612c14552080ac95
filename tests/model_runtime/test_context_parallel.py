"""Ranks that share every sequence compute what one computes alone, and the numbers of a text depend on nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_runtime.batch import make_batch
from model_runtime.blocks import expert_exchange
from model_runtime.blocks.moe import MixtureOfExperts
from model_runtime.checkpoint import load_model
from model_runtime.layout import Layout
from model_runtime.models.decoder import Decoder
from model_runtime.ops import load_ops
from model_runtime.ops.program import LayerProgram
from model_runtime.parallel import Mesh
from model_runtime.stripes import SharedSequences
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.ranks import mesh_on_shared_memory, mesh_on_threads
from tests.model_runtime.test_tensor_parallel import TEXTS, TOLERANCE, make

WIDTH = 4
LAYOUTS = [Layout(context_size=2), Layout(context_size=3), Layout(tensor_size=2, context_size=2)]
CASES = ["llama", "uneven", "a cut group", "qwen3", "gemma 3", "deepseek", "gpt-oss", "llama 4", "mimo"]


class SharedRun(PagedRun):
    """As its base, by a rank of a context group."""

    def __init__(
        self, folder: Path, kernels: str, mesh: Mesh, *, eager: bool = False, whole_experts: bool = False
    ) -> None:
        self.sequences = SharedSequences(mesh.context, WIDTH)
        ops = self.sequences.ops(load_ops(DEVICE, kernels))
        ops = replace(ops, layer_program=lambda layers, ranks, sharers: None) if eager else ops
        loaded = load_model(folder, ops, DEVICE, lambda done: None, mesh=mesh, whole_experts=whole_experts)
        super().__init__(loaded.decoder, WIDTH)
        self.block_size = self.sequences.stripes.block_size

    def step(self, chunks: dict[int, list[int]]) -> dict[int, Tensor]:
        with torch.inference_mode():
            batch = self.sequences.divided(make_batch(self.plan(chunks), self.block_size))
            hidden_TC = self.sequences.together(self.decoder.forward(batch, self.kv), batch)
            logits = self.decoder.logits(hidden_TC)
        return dict(zip(chunks, logits.split([len(tokens) for tokens in chunks.values()]), strict=True))


def logits(run: PagedRun, texts: dict[int, list[int]], chunk: int = 30) -> dict[int, Tensor]:
    """[tokens, V] of each text, whose prompts are computed in chunks beside each other, and the ends token by token."""
    found: dict[int, list[Tensor]] = {index: [] for index in texts}
    done = dict.fromkeys(texts, 0)
    while left := {index: text for index, text in texts.items() if done[index] < len(text)}:
        parts = {}
        for index, text in left.items():
            end = min(done[index] + chunk, len(text) - 3) if done[index] < len(text) - 3 else done[index] + 1
            parts[index] = text[done[index] : end]
            done[index] = end
        for index, part in run.step(parts).items():
            found[index].append(part)
    return {index: torch.cat(parts) for index, parts in found.items()}


def on_ranks(
    folder: Path, kernels: str, layout: Layout, texts: dict[int, list[int]] = TEXTS, chunk: int = 30
) -> dict[int, Tensor]:
    on_mesh = mesh_on_shared_memory if kernels == "auto" else mesh_on_threads
    return on_mesh(layout, lambda mesh: logits(SharedRun(folder, kernels, mesh), texts, chunk))[0]


@pytest.mark.parametrize(
    ("layout", "kernels"),
    [
        (Layout(context_size=2), "auto"),
        (Layout(context_size=2), "reference"),
        (Layout(context_size=3), "auto"),
        (Layout(tensor_size=2, context_size=2), "auto"),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_one_rank(tmp_path: Path, name: str, layout: Layout, kernels: str) -> None:
    make(tmp_path, name)
    alone = load_model(tmp_path, load_ops(DEVICE, "reference"), DEVICE, lambda done: None).decoder
    expected, found = logits(PagedRun(alone), TEXTS), on_ranks(tmp_path, kernels, layout)
    for index, text in TEXTS.items():
        assert found[index].shape == expected[index].shape == (len(text), 259)
        assert (found[index] - expected[index]).abs().max().item() <= TOLERANCE
        assert torch.equal(found[index].argmax(-1), expected[index].argmax(-1))


@pytest.mark.parametrize(("name", "tensor_size"), [("uneven", 2), ("a cut group", 2), ("gemma 3", 1)])
def test_layers_in_one_call_are_layers_operation_by_operation(tmp_path: Path, name: str, tensor_size: int) -> None:
    """Bit for bit."""
    make(tmp_path, name)

    def both(mesh: Mesh) -> list[dict[int, Tensor]]:
        runs = [SharedRun(tmp_path, "auto", mesh), SharedRun(tmp_path, "auto", mesh, eager=True)]
        assert [isinstance(run.decoder.stack, LayerProgram) for run in runs] == [True, False]
        return [logits(run, TEXTS) for run in runs]

    for compiled, eager in mesh_on_shared_memory(Layout(tensor_size=tensor_size, context_size=2), both):
        assert all(torch.equal(compiled[index], eager[index]) for index in TEXTS)


@pytest.mark.parametrize("name", ["uneven", "deepseek"])
def test_a_text_is_the_same_alone_and_beside_others_and_in_any_chunks(tmp_path: Path, name: str) -> None:
    """Bit for bit."""
    make(tmp_path, name)
    layout = Layout(context_size=2)
    together = on_ranks(tmp_path, "auto", layout)
    for index, text in TEXTS.items():
        assert torch.equal(on_ranks(tmp_path, "auto", layout, {index: text}, chunk=7)[index], together[index])


@pytest.mark.parametrize(("size", "kernels"), [(2, "auto"), (3, "auto"), (2, "reference")])
@pytest.mark.parametrize("name", ["deepseek", "gpt-oss", "llama 4"])
def test_experts_divided_among_ranks_give_what_all_give(
    tmp_path: Path, name: str, size: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With compiled operations bit for bit; in rounds of a few rows, every pair of a token and an expert once."""
    tolerance = 0.0 if kernels == "auto" else TOLERANCE
    monkeypatch.setattr(expert_exchange, "EXCHANGED_ROWS", 10)
    make(tmp_path, name)

    def both(mesh: Mesh) -> list[tuple[dict[int, Tensor], Decoder]]:
        runs = [SharedRun(tmp_path, kernels, mesh, whole_experts=whole) for whole in (False, True)]
        return [(logits(run, TEXTS), run.decoder) for run in runs]

    on_mesh = mesh_on_shared_memory if kernels == "auto" else mesh_on_threads
    ranks = on_mesh(Layout(context_size=size), both)
    for (all_here, _), (divided, _) in ranks:
        assert max((divided[index] - all_here[index]).abs().max().item() for index in TEXTS) <= tolerance
    assert sum(some[1].expert_tokens() for some, _ in ranks) == sum(some[1].expert_tokens() for _, some in ranks) > 0
    mixtures = [[layer.mlp for layer in some[1].layers if isinstance(layer.mlp, MixtureOfExperts)] for _, some in ranks]
    for layer in zip(*mixtures, strict=True):
        experts = [index for mixture in layer for index in mixture.experts]
        assert experts == list(range(layer[0].config.num_experts))
        assert all(mixture.tokens > 0 for mixture in layer)
