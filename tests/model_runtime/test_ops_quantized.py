"""The compiled product of rows and a matrix of integers: against the reference in float64, the same bits in every batch
(few rows and many are computed by different instructions), and at the ends of the range."""

import pytest
import torch

from model_runtime.ops import set_threads
from model_runtime.quantized import (
    FORMS,
    QuantizedFormat,
    QuantizedMatrix,
    RowBits,
    columns_of,
    dequantize,
    is_finite,
    join_blocks,
    num_groups,
    row_bytes,
)
from tests.model_runtime.op_cases import EXACT, assert_close, compiled, randn

FORMATS: list[QuantizedFormat] = ["q8_0", "q4_0", "q4_0_128", "q4_1", "q4_z", "q4_z_128", "mxfp4", "q4_k", "q6_k"]
PRODUCTS: list[tuple[QuantizedFormat, RowBits]] = [("q8_0", 8), *((form, 16) for form in FORMATS)]
"""Matrices, and the integers that rows become for them."""


def matrix(form: QuantizedFormat, n: int, k: int, seed: int = 0) -> QuantizedMatrix:
    """Integers of the whole range, -128 too; scales and minima between 2^-24, the least of float16, and 1; zero points
    from 0 to 15."""
    generator, span = torch.Generator().manual_seed(seed), FORMS[form].numbers
    groups = num_groups(form, k)
    if FORMS[form].shared > 1:
        blocks = torch.empty(n * groups, FORMS[form].head, dtype=torch.uint8)
    else:
        blocks = torch.randint(0, 256, (n * groups, row_bytes(form, span)), dtype=torch.uint8, generator=generator)
    scales = (
        torch.randn(len(blocks), 2, generator=generator).clamp(-1, 1)
        * 10.0 ** -(torch.arange(len(blocks)) % 9)[:, None]
    )
    if form in ("q4_z", "q4_z_128"):
        scales[:, 1] = torch.randint(0, 16, (len(blocks),), generator=generator)
    if form == "mxfp4":
        scales = torch.randint(97, 132, (len(blocks), 1), generator=generator)
    if form in ("q4_k", "q6_k"):  # factors of 64 numbers or 127
        places = slice(0, 4) if form == "q4_k" else slice(208, 210)
        blocks[:, places] = (scales / 64).half().view(torch.uint8)[:, : places.stop - places.start]
        return QuantizedMatrix(data_NR=blocks.view(n, -1), format=form, num_columns=k)
    head = scales[:, : FORMS[form].head // FORMS[form].head_dtype.itemsize].to(FORMS[form].head_dtype).contiguous()
    blocks[:, : FORMS[form].head] = head.view(torch.uint8)
    if FORMS[form].shared > 1:
        heads = tuple(head.view(n, groups, -1).unbind(2))
        return join_blocks(form, heads, torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator))
    return QuantizedMatrix(data_NR=blocks.view(n, -1), format=form, num_columns=k)


def columns(form: QuantizedFormat, wanted: int) -> int:
    """Or the next number of whole blocks."""
    return -(-wanted // FORMS[form].numbers) * FORMS[form].numbers


@pytest.mark.parametrize(("form", "bits"), PRODUCTS)
@pytest.mark.parametrize(("n", "blocks"), [(1, 1), (40, 2), (75, 19), (16, 48)])
def test_product(form: QuantizedFormat, bits: RowBits, n: int, blocks: int) -> None:
    k = columns(form, 32 * blocks)
    ops, m, bias = compiled(), matrix(form, n, k), randn(n, seed=1)
    weight, exact = ops.pack_quantized(m, bits), EXACT.pack_quantized(m, bits)
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 70):
        x = randn(rows, k, seed=rows)
        assert_close(ops.linear(x, weight, None), EXACT.linear(x.double(), exact, None), 1e-6)
        assert_close(ops.linear(x, weight, bias), EXACT.linear(x.double(), exact, bias), 1e-6)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 30])
def test_with_float_rows_the_product_is_that_of_the_expanded_matrix(form: QuantizedFormat, rows: int) -> None:
    ops, m, bias, x = (
        compiled(),
        matrix(form, 603, columns(form, 96)),
        randn(603, seed=1),
        randn(rows, columns(form, 96), seed=2),
    )
    expanded = ops.linear(x, ops.pack(dequantize(m)), bias)
    assert torch.equal(ops.linear(x, ops.pack_quantized(m, 0), bias), expanded)


@pytest.mark.parametrize("form", FORMATS)
def test_embedding_is_what_the_format_defines(form: QuantizedFormat) -> None:
    ops, m = compiled(), matrix(form, 75, columns(form, 96))
    ids = torch.tensor([0, 74, 16, 16, 31], dtype=torch.int32)
    assert torch.equal(ops.embedding(ids, ops.pack_quantized(m, 16)), dequantize(m)[ids])


def test_every_number_of_mxfp4_with_the_least_and_largest_exponents() -> None:
    codes = torch.arange(32, dtype=torch.uint8).remainder(16).repeat(4, 1)
    m = join_blocks("mxfp4", (torch.tensor([0, 1, 127, 252], dtype=torch.uint8),), codes)
    ids, (_, least, one, largest) = torch.arange(4, dtype=torch.int32), dequantize(m)
    assert one[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6] and torch.equal(one[8:16], -one[:8])
    assert torch.equal(least.double(), one.double() * 2.0**-126)
    assert torch.equal(largest.double(), one.double() * 2.0**125)
    assert torch.equal(compiled().embedding(ids, compiled().pack_quantized(m, 16)), dequantize(m))
    assert is_finite(m)
    assert not is_finite(join_blocks("mxfp4", (torch.tensor([253], dtype=torch.uint8),), codes[:1]))


@pytest.mark.parametrize(("form", "bits"), PRODUCTS)
def test_a_row_is_the_same_in_every_batch(form: QuantizedFormat, bits: RowBits) -> None:
    ops, before, x, bias = (
        compiled(),
        torch.get_num_threads(),
        randn(300, columns(form, 544), seed=3),
        randn(70, seed=4),
    )
    weight = ops.pack_quantized(matrix(form, 70, columns(form, 544)), bits)
    alone = torch.cat([ops.linear(x[i : i + 1], weight, bias) for i in range(len(x))])
    for threads in (1, 2, 3):
        set_threads(threads)
        for rows in (*range(2, 35), 128, 300):
            assert torch.equal(ops.linear(x[:rows], weight, bias), alone[:rows]), f"{rows} rows"
            shifted = x.roll(rows // 2, 0)[:rows].contiguous()
            assert torch.equal(ops.linear(shifted, weight, bias), alone.roll(rows // 2, 0)[:rows]), f"{rows}, shifted"
    set_threads(before)


@pytest.mark.parametrize("form", ["q4_0_128", "q4_z_128"])
@pytest.mark.parametrize("k", [32, 128, 160, 576, 1536])
def test_a_scale_of_four_blocks_gives_the_same_bits_as_one_each(form: QuantizedFormat, k: int) -> None:
    """The last group may be short; rows of one, few and many tiles."""
    ops, m, x = compiled(), matrix(form, 75, k), randn(40, k, seed=2)
    assert m.data_NR.shape[1] == k // 2 + -(-k // 128) * FORMS[form].head
    repeated = columns_of(m, slice(0, k), "q4_0" if form == "q4_0_128" else "q4_z")
    weight, of_blocks = (ops.pack_quantized(each, 16) for each in (m, repeated))
    assert weight.num_bytes < of_blocks.num_bytes or k == 32
    for rows in (1, 2, 7, 40):
        assert torch.equal(ops.linear(x[:rows], weight, None), ops.linear(x[:rows], of_blocks, None))


@pytest.mark.parametrize(("form", "bits"), PRODUCTS)
@pytest.mark.parametrize("rows", [6, 20])
def test_rows_at_the_ends_of_the_range(form: QuantizedFormat, bits: RowBits, rows: int) -> None:
    """Zeros, an outlier, the largest values on both sides, and numbers too small to have a scale."""
    ops, m = compiled(), matrix(form, 40, columns(form, 64))
    x = randn(rows, columns(form, 64))
    x[0] = 0
    x[1, 5] = 1e30
    x[2], x[3] = 3.0, -3.0
    x[4] = 1e-42
    x[5] *= 1e-30
    exact = EXACT.linear(x.double(), EXACT.pack_quantized(m, bits), None)
    out = ops.linear(x, ops.pack_quantized(m, bits), None)
    for row in range(rows):
        assert (out[row].double() - exact[row]).abs().max() <= 1e-6 * exact[row].abs().max() + 1e-40
    assert not out[0].any()


@pytest.mark.parametrize(("form", "bits"), PRODUCTS)
@pytest.mark.parametrize("rows", [2, 20])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_nothing_finite(
    form: QuantizedFormat, bits: RowBits, rows: int, broken: float
) -> None:
    ops, m, x = compiled(), matrix(form, 40, columns(form, 64)), randn(rows, columns(form, 64))
    x[1, 40] = broken
    out = ops.linear(x, ops.pack_quantized(m, bits), None)
    assert not out[1].isfinite().any()
    assert out[[0, *range(2, rows)]].isfinite().all()
