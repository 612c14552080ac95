"""Stacked experts, plain and in MXFP4, become each expert's matrices, as transformers reads them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from model_runtime.checkpoint import load_model
from model_runtime.ops import load_ops
from model_runtime.parallel import Alone, Collectives, tensor_mesh
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.mxfp4 import Mxfp4
from model_runtime.weights.safetensors_source import read_safetensors
from model_runtime.weights.source import read, whole
from model_runtime.weights.stacks import unstacked
from tests.family_cases import make_random_model
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.ranks import on_threads
from tests.model_runtime.test_alignment import random_prompts, reference_logits

PROJECTIONS = ("gate_up_proj", "down_proj")


def packed(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks and scales around 2^-3."""
    generator = torch.Generator().manual_seed(sum(shape))
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)


def expanded(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[N, K] of blocks [N, B, 16] and scales [N, B]."""
    shape = (blocks.shape[0], blocks.shape[1] * 32)
    matrix = Mxfp4(shape, "made up", lambda rows, part: (blocks[rows, part], scales[rows, part]))
    return read(matrix, whole(shape), torch.float32)


def test_numbers_are_those_of_transformers() -> None:
    blocks, scales = packed(2, 6, 3)
    scales[0, 0] = torch.tensor([0, 1, 254])
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for expert in range(2):
        assert torch.equal(expanded(blocks[expert], scales[expert]), expected[expert].T)


def make_packed(folder: Path) -> list[torch.Tensor]:
    """A GPT-OSS in MXFP4; what transformers makes of prompts with the same numbers."""
    model = make_random_model(folder, "gpt_oss", seed=0)
    tensors = load_file(folder / "model.safetensors")
    for name, parameter in list(model.named_parameters()):
        if name.endswith(PROJECTIONS):
            experts, columns, rows = parameter.shape
            blocks, scales = packed(experts, rows, columns // 32)
            parameter.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return reference_logits(model, random_prompts((23,)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_mxfp4_checkpoint(tmp_path: Path, ranks: int) -> None:
    (expected,), (prompt,) = make_packed(tmp_path), random_prompts((23,))

    def logits(collectives: Collectives) -> torch.Tensor:
        ops = load_ops(DEVICE, "auto")
        loaded = load_model(tmp_path, ops, DEVICE, lambda done: None, mesh=tensor_mesh(collectives))
        return PagedRun(loaded.decoder).step({0: prompt})[0]

    found = logits(Alone()) if ranks == 1 else on_threads(ranks, logits)[0]
    assert (found - expected).abs().max() <= 1e-4


def test_any_part_can_be_read(tmp_path: Path) -> None:
    """Also columns that do not begin with a block."""
    blocks, scales = packed(2, 8, 2)
    stacks = {"e.experts.down_proj_blocks": blocks, "e.experts.down_proj_scales": scales, "other": torch.ones(3)}
    save_file(stacks, tmp_path / "model.safetensors")
    source = unstacked(read_safetensors(tmp_path), "alternating", 64)
    assert source.keys() == {"other", "e.experts.0.down_proj.weight", "e.experts.1.down_proj.weight"}
    matrix = source["e.experts.1.down_proj.weight"]
    assert (matrix.shape, matrix.dtype) == ((8, 64), torch.bfloat16)
    full, part = read(matrix, whole((8, 64))), read(matrix, (slice(2, 5), slice(17, 47)), torch.float32)
    assert torch.equal(full, expanded(blocks[1], scales[1]))
    assert torch.equal(part, full[2:5, 17:47])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"e.experts.down_proj": torch.ones(2, 3)}, "has shape [2, 3], which is no stack of experts"),
        ({"e.experts.down_proj_blocks": torch.ones(1, 1, 1, 16, dtype=torch.uint8)}, "has no scales beside it"),
        ({"e.experts.gate_up_proj": torch.ones(3), "e.experts.down_proj": torch.ones(1, 3, 3)}, "no stack of experts"),
        ({"e.experts.down_proj": torch.ones(10**9, 0, 3)}, "[1000000000, 0, 3], which is no stack of experts"),
        ({"e.experts.down_proj_blocks": torch.ones(1, 1, 1, 16)}, "and not blocks of 16 bytes"),
        ({"e.experts.down_proj_blocks": torch.ones(1, 1, 1, 15, dtype=torch.uint8)}, "and not blocks of 16 bytes"),
        (
            {
                "e.experts.down_proj_blocks": torch.ones(2, 4, 2, 16, dtype=torch.uint8),
                "e.experts.down_proj_scales": torch.ones(2, 4, 1, dtype=torch.uint8),
            },
            "are torch.uint8 [2, 4, 1], and not bytes [2, 4, 2]",
        ),
    ],
)
def test_refusals(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        unstacked(read_safetensors(tmp_path), "alternating", 64)
    assert message in str(caught.value)


@pytest.mark.parametrize(("hidden", "width"), [(64, 24), (48, 24), (24, 24)], ids=str)
@pytest.mark.parametrize("upright", [False, True])
def test_halves_either_way_round(tmp_path: Path, hidden: int, width: int, upright: bool) -> None:
    """Also where one of the two matrices is square."""
    generator = torch.Generator().manual_seed(0)
    gate_up, down = (torch.randn(3, *shape, generator=generator) for shape in ((2 * width, hidden), (hidden, width)))
    stacks = {"e.experts.gate_up_proj": gate_up, "e.experts.down_proj": down}
    turned = {key: tensor.transpose(1, 2).contiguous() for key, tensor in stacks.items()}
    save_file(stacks if upright else turned, tmp_path / "model.safetensors")
    source = unstacked(read_safetensors(tmp_path), "halves", hidden)
    for part, rows in (("gate", slice(0, width)), ("up", slice(width, 2 * width))):
        matrix = source[f"e.experts.1.{part}_proj.weight"]
        assert torch.equal(read(matrix, whole(matrix.shape)), gate_up[1, rows])
        assert torch.equal(read(matrix, (slice(3, 9), slice(5, 17))), gate_up[1, rows][3:9, 5:17])
    matrix = source["e.experts.2.down_proj.weight"]
    assert torch.equal(read(matrix, whole(matrix.shape)), down[2])
