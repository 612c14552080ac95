"""The compiled product with a matrix of floats of 8 bits: against the reference in float64, every one of its numbers,
and the same bits in every batch."""

import pytest
import torch

from model_runtime.ops import set_threads
from model_runtime.quantized import QuantizedMatrix, dequantize, is_finite, join_blocks
from tests.model_runtime.op_cases import EXACT, assert_close, compiled, randn

SPAN = 128


def matrix(n: int, k: int) -> QuantizedMatrix:
    """Of all the format's numbers, with scales from 2^-30 to 2^30."""
    codes = torch.randint(0, 254, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    codes += (codes >= 127).byte()  # 127 and 255 are no numbers
    scales = randn(n, k // SPAN, seed=k) * 2.0 ** (torch.arange(n * k // SPAN).view(n, -1) % 61 - 30)
    return join_blocks("fp8", (scales,), codes)


@pytest.mark.parametrize(("n", "k"), [(1, 128), (40, 256), (75, 640)])
def test_product(n: int, k: int) -> None:
    ops, m, bias = compiled(), matrix(n, k), randn(n, seed=1)
    weight, exact = ops.pack_quantized(m, 16), EXACT.pack_quantized(m, 16)
    assert weight.quantized == "fp8" and not weight.row_bits
    for rows in (1, 2, 3, 4, 5, 12, 13, 24, 31, 70):
        x = randn(rows, k, seed=rows)
        assert_close(ops.linear(x, weight, None), EXACT.linear(x.double(), exact, None), 1e-6)
        assert_close(ops.linear(x, weight, bias), EXACT.linear(x.double(), exact, bias), 1e-6)


def test_every_number_is_what_the_format_defines() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    codes[codes % 128 == 127] = 0
    m = join_blocks("fp8", (torch.tensor([[3.0], [2.0**-130]]),), codes)
    ids = torch.tensor([1, 0], dtype=torch.int32)
    found = compiled().embedding(ids, compiled().pack_quantized(m, 0))
    expected = codes.view(torch.float8_e4m3fn).float() * torch.tensor([[3.0], [2.0**-130]])
    assert torch.equal(found, expected[ids])
    assert torch.equal(dequantize(m), expected)
    assert is_finite(m)
    for code in (127, 255):
        codes[1, 5] = code
        assert not is_finite(join_blocks("fp8", (torch.ones(2, 1),), codes))


def test_a_row_is_the_same_in_every_batch() -> None:
    ops, before, x, bias = compiled(), torch.get_num_threads(), randn(300, 512, seed=3), randn(70, seed=4)
    weight = ops.pack_quantized(matrix(70, 512), 16)
    alone = torch.cat([ops.linear(x[i : i + 1], weight, bias) for i in range(len(x))])
    for threads in (1, 2, 3):
        set_threads(threads)
        for rows in (*range(2, 30), 128, 300):
            assert torch.equal(ops.linear(x[:rows], weight, bias), alone[:rows]), f"{rows} rows"
            shifted = x.roll(rows // 2, 0)[:rows].contiguous()
            assert torch.equal(ops.linear(shifted, weight, bias), alone.roll(rows // 2, 0)[:rows]), f"{rows}, shifted"
    set_threads(before)
