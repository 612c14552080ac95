"""What is planned of weights is what loading them takes, in every layout, precision and kind of checkpoint; and a
config.json alone plans what the files beside it would."""

from pathlib import Path

import pytest
import torch

from model_runtime.memory.planning import Outline
from model_runtime.models.decoder import decoder_table
from model_runtime.opening import open_checkpoint, open_configuration
from model_runtime.ops import load_ops
from model_runtime.ops.registry import Ops, select
from model_runtime.share import Share
from model_runtime.stages import rank_shares
from model_runtime.weights.load import Precision, load_parameters
from model_runtime.weights.table import Parameters
from tests.checkpoints import make_checkpoint, make_model
from tests.family_cases import DRAWS, make_random_model
from tests.model_runtime import deepseek
from tests.model_runtime.paged import DEVICE
from tests.model_runtime.test_quantized import STORED, write_quantized
from tests.vlm import make_vlm

SIZES = ((1, 1, 1), (2, 1, 2))
PRECISIONS = (
    Precision(),
    Precision(quantization="int8"),
    Precision(quantization="int4", row_bits=0),
    Precision(quantization="int4-g128"),
)


def make(folder: Path, name: str) -> Path:
    if name == "deepseek":
        deepseek.make_model({"vocab_size": 288, "moe_intermediate_size": 32}).save_pretrained(folder)
    elif name == "gguf":
        shape = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
        write_quantized(folder / "m.gguf", make_model("llama", shape), STORED["q4_1"])
        return folder / "m.gguf"
    elif name in DRAWS:
        make_random_model(folder, name, 0)
    else:
        make_checkpoint(folder, name, {"hidden_size": 128, "intermediate_size": 192}, torch.bfloat16)
    return folder


def loaded(model: Outline, share: Share, how: Precision, ops: Ops) -> Parameters:
    table, source = decoder_table(model.opened.config), model.opened.source
    return load_parameters(table, source, ops, DEVICE, lambda key: True, lambda count: None, share, how)


@pytest.mark.parametrize("name", ["llama", "gguf", "qwen2_moe", "gpt_oss", "minimax_m2", "deepseek"])
def test_weights_take_what_is_planned(name: str, tmp_path: Path) -> None:
    """To the byte, packed by compiled kernels and as on a GPU."""
    model = Outline(open_checkpoint(make(tmp_path, name)))
    for sizes in SIZES:
        for whole in (False, True) if model.opened.config.experts is not None and sizes[0] > 1 else (False,):
            for share in rank_shares(model.opened.config, sizes, whole_experts=whole):
                ways = [(how, load_ops(DEVICE, "auto")) for how in PRECISIONS]
                for how, ops in [*ways, (PRECISIONS[0], select("cuda"))]:
                    planned, found = model.weights(share, how, ops), loaded(model, share, how, ops)
                    assert planned.total == found.num_bytes, (sizes, whole, share.rank, how)
                    assert planned.row_bits == found.row_bits


@pytest.mark.parametrize("name", ["llama", "qwen2_moe", "deepseek"])
def test_rows_of_8_bits_take_no_other_weights(name: str, tmp_path: Path) -> None:
    model = Outline(open_checkpoint(make(tmp_path, name)))
    wide, narrow = Precision(quantization="int8"), Precision(quantization="int8", row_bits=8)
    for share in rank_shares(model.opened.config, (2, 1, 1), whole_experts=False):
        for ops in (load_ops(DEVICE, "auto"), select("any"), select("cuda")):
            planned, found = model.weights(share, narrow, ops), loaded(model, share, narrow, ops)
            assert planned.row_bits == found.row_bits == 8
            assert planned.total == found.num_bytes == model.weights(share, wide, ops).total


@pytest.mark.parametrize("name", DRAWS)
def test_a_configuration_plans_what_its_files_would(name: str, tmp_path: Path) -> None:
    files = Outline(open_checkpoint(make(tmp_path, name)))
    alone = Outline(open_configuration(tmp_path / "config.json"))
    assert alone.num_parameters == files.num_parameters
    experts = alone.opened.config.experts
    for whole in (False,) if experts is None else (False, True):
        for share in rank_shares(alone.opened.config, (2, 1, 1), whole_experts=whole):
            for how in PRECISIONS:
                expected, found = (model.weights(share, how, select("any")) for model in (files, alone))
                assert found == expected


@pytest.mark.parametrize("name", ["llava-clip", "qwen3_vl", "gemma3", "kimi_k25"])
def test_an_image_side_is_planned_with_files_and_without(name: str, tmp_path: Path) -> None:
    make_vlm(tmp_path, name)
    files = Outline(open_checkpoint(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    alone = Outline(open_configuration(tmp_path / "config.json"))
    assert alone.vision == files.vision
    assert set(files.vision) == {"vision tower", "projector"}
    assert alone.num_parameters == files.num_parameters
