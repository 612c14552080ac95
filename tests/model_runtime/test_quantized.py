"""Matrices of integers: made, expanded, read from a file as they are, and what a model of them computes."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from model_runtime.checkpoint import LoadedModel, load_model
from model_runtime.models.decoder import Decoder
from model_runtime.ops import load_ops
from model_runtime.quantized import (
    FORMS,
    LARGEST_IN_ROW,
    QuantizedFormat,
    QuantizedMatrix,
    RowBits,
    columns_of,
    dequantize,
    is_finite,
    quantize,
    quantize_rows,
    row_bytes,
)
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.load import EXACT, Precision
from tests.checkpoints import make_checkpoint, make_model
from tests.model_runtime.op_cases import randn
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.test_gguf import gguf_name, metadata, permuted
from tests.model_runtime.test_gguf_file import finish

MADE: list[QuantizedFormat] = ["q8_0", "q4_0", "q4_0_128"]
SUPER = {"q4_k": GGMLQuantizationType.Q4_K, "q6_k": GGMLQuantizationType.Q6_K}
"""Blocks of 256, which `gguf` expands but does not make."""
WIDE: dict[str, object] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
STORED = {name: GGMLQuantizationType[name.upper()] for name in ("q8_0", "q4_0", "q4_1", "mxfp4")}


def load(path: Path, precision: Precision, kernels: str = "reference") -> LoadedModel:
    return load_model(path, load_ops(DEVICE, kernels), DEVICE, lambda fraction: None, precision=precision)


def logits(decoder: Decoder) -> Tensor:
    return PagedRun(decoder).step({0: list(range(3, 36))})[0]


@pytest.mark.parametrize("quantized", MADE)
def test_numbers_are_rounded_to_the_nearest_step(quantized: QuantizedFormat) -> None:
    weight = randn(5, 160, seed=1)
    weight[2] = 0
    matrix = quantize(weight.bfloat16(), quantized)
    assert matrix.data_NR.shape == (5, row_bytes(quantized, 160))
    weight, found = weight.bfloat16().float(), dequantize(matrix)
    for numbers, rounded in zip(*(each.split(FORMS[quantized].group, dim=1) for each in (weight, found)), strict=True):
        step = numbers.abs().amax(-1, keepdim=True) / (127 if quantized == "q8_0" else 8)
        # 4 bits reach from -8 to 7: a number beyond 7.5 on the other side is a whole step off
        most = step * (0.501 if quantized == "q8_0" else 1.0) + 1e-3 * numbers.abs()
        assert ((rounded - numbers).abs() <= most).all()
    assert not found[2].any()


def test_bytes_of_groups() -> None:
    """A scale for every 128, and one for what is left: 4.139 bits of 576 columns."""
    assert [row_bytes("q4_0_128", columns) for columns in (32, 128, 160, 576)] == [18, 66, 84, 298]
    assert [row_bytes("q4_z_128", columns) for columns in (32, 128, 160, 576)] == [20, 68, 88, 308]


def test_blocks_of_groups_are_the_same_numbers() -> None:
    """Of some columns, too, which begin inside a group, or with one."""
    matrix = quantize(randn(5, 416, seed=1), "q4_0_128")
    for columns, form in ((slice(96, 352), "q4_0"), (slice(128, 352), "q4_0_128"), (slice(0, 416), "q4_0")):
        some = columns_of(matrix, columns, form)  # type: ignore[arg-type]
        assert some.format == form and some.num_columns == columns.stop - columns.start
        assert torch.equal(dequantize(some), dequantize(matrix)[:, columns])
    matrix.data_NR[3, 6:8] = torch.tensor([torch.nan]).half().view(torch.uint8)  # the scale of the last group
    assert not is_finite(matrix) and is_finite(columns_of(matrix, slice(0, 384), "q4_0_128"))
    with pytest.raises(AssertionError, match="inside a block or group"):
        columns_of(matrix, slice(96, 352), "q4_0_128")


@pytest.mark.parametrize("bits", LARGEST_IN_ROW)
def test_rows_for_a_product(bits: RowBits) -> None:
    x = torch.cat((randn(3, 64, seed=1), torch.zeros(1, 64), torch.full((1, 64), 1e-30)))
    steps = x.view(5, 2, 32).abs().amax(-1, keepdim=True) / LARGEST_IN_ROW[bits]
    assert ((quantize_rows(x, bits).view(5, 2, 32) - x.view(5, 2, 32)).abs() <= 0.5001 * steps).all()
    for broken in (torch.nan, torch.inf, -torch.inf):
        x[1, 40] = broken
        finite = quantize_rows(x, bits).isfinite()
        assert finite[1, :32].all() and not finite[1, 32:].all() and finite[[0, 2, 3, 4]].all()


def stored(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """As bytes; of a kind that nothing here makes, some of the right size."""
    if kind not in SUPER.values():
        return gguf.quants.quantize(rows, kind)
    size = row_bytes("q4_k" if kind == GGMLQuantizationType.Q4_K else "q6_k", 256)
    blocks = np.random.default_rng(rows.shape[0]).integers(0, 256, (rows.size // 256, size), np.uint8)
    factors = slice(0, 4) if kind == GGMLQuantizationType.Q4_K else slice(208, 210)
    blocks[:, factors] = np.array([2e-4, 1.5e-3], np.float16).view(np.uint8)[: factors.stop - factors.start]
    return blocks.reshape(rows.shape[0], -1)


def write_quantized(
    path: Path, model: PreTrainedModel, kind: GGMLQuantizationType, of_values: GGMLQuantizationType | None = None
) -> None:
    """All matrices of one kind, or those that make values of another."""
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    writer = GGUFWriter(path, "llama")
    metadata(writer, model)
    for key, tensor in model.state_dict().items():
        rows, projection = tensor.numpy(), key.split(".")[-2]
        rows = np.ascontiguousarray(permuted(rows, heads[projection]) if projection in heads else rows)
        if rows.ndim == 2:
            chosen = of_values if of_values is not None and projection == "v_proj" else kind
            writer.add_tensor(gguf_name(key), stored(rows, chosen), raw_dtype=chosen)
        else:
            writer.add_tensor(gguf_name(key), rows)
    finish(writer)


@pytest.mark.parametrize("quantized", STORED | SUPER)
def test_integers_of_a_gguf_file_are_kept(tmp_path: Path, quantized: str) -> None:
    """Matrices hold the file's integers, and with float32 rows the model computes what its expanded copy computes."""
    model, kind = make_model("llama", WIDE if quantized in SUPER else {}), (STORED | SUPER)[quantized]
    write_quantized(tmp_path / "m.gguf", model, kind)
    decoder = load(tmp_path / "m.gguf", EXACT).decoder
    weight = decoder.layers[1].mlp.down.weight
    expected = stored(model.model.layers[1].mlp.down_proj.weight.detach().numpy(), kind)
    assert weight.quantized == quantized
    assert np.array_equal(weight.data.numpy(), expected.view(np.uint8))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            numbers = torch.from_numpy(gguf.quants.dequantize(stored(parameter.detach().numpy(), kind), kind))
            if quantized in SUPER and name.split(".")[-2] in ("q_proj", "k_proj"):  # made up in the file's order
                pairs = numbers.view(-1, model.config.head_dim // 2, 2, numbers.shape[1])
                numbers = pairs.transpose(1, 2).flatten(0, 2)
            parameter.data = numbers
    with torch.inference_mode():
        reference = model(torch.tensor([list(range(3, 36))])).logits[0]
    assert (logits(decoder) - reference).abs().max() <= 1e-4


def test_stacked_matrices_of_two_formats_take_16_bits(tmp_path: Path) -> None:
    """Queries, keys and values; with float32 rows they are float32, and what the file says exactly."""
    write_quantized(tmp_path / "m.gguf", make_model("llama", WIDE), SUPER["q4_k"], SUPER["q6_k"])
    exact, usual = load(tmp_path / "m.gguf", EXACT).decoder, load(tmp_path / "m.gguf", Precision()).decoder
    of_both = [decoder.layers[1].attention.qkv.weight for decoder in (exact, usual)]
    assert [weight.data.dtype for weight in of_both] == [torch.float32, torch.float16]
    assert torch.equal(of_both[1].data, of_both[0].data.half())
    assert usual.layers[1].attention.output.weight.quantized == "q4_k"
    assert (logits(usual) - logits(exact)).norm() <= 1e-3 * logits(exact).norm()


@pytest.mark.parametrize("quantization", ["int8", "int4", "int4-g128"])
def test_quantised_while_loading(tmp_path: Path, quantization: str) -> None:
    make_checkpoint(tmp_path, "llama", {})
    exact = load(tmp_path, EXACT)
    how = Precision(quantization=quantization, row_bits=0)  # type: ignore[arg-type]
    small = load(tmp_path, how)
    narrow: QuantizedFormat = "q8_0" if quantization == "int8" else "q4_0" if quantization == "int4" else "q4_0_128"
    made, floats = small.decoder.layers[0].attention.qkv.weight, exact.decoder.layers[0].attention.qkv.weight
    assert made.quantized == narrow
    assert torch.equal(made.data, quantize(floats.data, narrow).data_NR)
    assert small.decoder.embedding.quantized == "q8_0"
    assert small.weight_bytes < exact.weight_bytes * (0.3 if quantization == "int8" else 0.25)
    # random weights make this model amplify the rounding of each matrix, 0.6 % and 8.5 %, about eightfold
    difference = (logits(small.decoder) - logits(exact.decoder)).norm() / logits(exact.decoder).norm()
    assert 0 < difference < (0.1 if quantization == "int8" else 0.9)


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", {})
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = 1e30
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"too large ones, in model\.layers\.0\.mlp\.up_proj\.weight \(model\.safetensors\)"
    ):
        load(tmp_path, Precision(quantization="int4"))


def test_bytes_must_fit() -> None:
    with pytest.raises(AssertionError, match="do not fit"):
        QuantizedMatrix(data_NR=torch.zeros(2, 35, dtype=torch.uint8), format="q8_0", num_columns=32)
    with pytest.raises(AssertionError, match="not blocks of 32"):
        row_bytes("q4_0", 40)
