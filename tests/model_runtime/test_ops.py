"""Every registered implementation of the dense operations against the reference in float64; those on heads and the KV
cache are in `test_ops_attention.py`."""

import pytest
import torch

from model_runtime.ops.registry import Activation, Ops, implementations
from tests.model_runtime.op_cases import EXACT, STORAGE_TYPES, assert_close, compiled, randn


def test_every_operation_is_registered_for_any_device_and_for_cpu() -> None:
    for name in Ops.__dataclass_fields__:
        assert set(implementations(name)) >= {"any", "cpu"}


@pytest.mark.parametrize("dtype", STORAGE_TYPES)
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 16, 8), (1, 75, 33), (3, 1, 1), (5, 100, 257), (7, 40, 600), (31, 50, 513)]
)
def test_linear(ops: Ops, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    x, weight, bias = randn(rows, k, seed=1), randn(n, k, seed=2).to(dtype), randn(n, seed=3)
    exact = x.double() @ weight.double().T
    assert_close(ops.linear(x, ops.pack(weight), None), exact, 1e-6)
    assert_close(ops.linear(x, ops.pack(weight), bias), exact + bias.double(), 1e-6)


def test_linear_expands_every_float16_and_bfloat16_number_exactly(ops: Ops) -> None:
    """A matrix unit takes numbers below 2^-126 for zero, and multiplies parts of numbers: infinities may become NaN."""
    for dtype in (torch.float16, torch.bfloat16):
        numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        finite = numbers[numbers.isfinite()][:, None]
        normal = finite.float().abs()[:, 0] >= 2.0**-126
        for rows in (1, 2):
            out = ops.linear(torch.ones(rows, 1), ops.pack(finite), None)[-1]
            assert torch.equal(out[normal], finite[normal, 0].float())
            assert (out[~normal] - finite[~normal, 0].float()).abs().max() < 2.0**-126
        special = torch.tensor([[float("inf")], [float("-inf")], [float("nan")]], dtype=dtype)
        for rows in (1, 9):
            assert not ops.linear(torch.ones(rows, 1), ops.pack(special), None).isfinite().any()


@pytest.mark.parametrize("dtype", STORAGE_TYPES)
def test_embedding_returns_the_rows_exactly(ops: Ops, dtype: torch.dtype) -> None:
    table = randn(75, 33).to(dtype)
    ids = torch.tensor([0, 74, 16, 16, 31], dtype=torch.int32)
    assert torch.equal(ops.embedding(ids, ops.pack(table)), table[ids].float())


@pytest.mark.parametrize("bad", [-1, 75])
def test_embedding_refuses_ids_outside_the_table(bad: int) -> None:
    ops = compiled()
    with pytest.raises(AssertionError, match=r"outside 0 \.\. 74"):
        ops.embedding(torch.tensor([3, bad], dtype=torch.int32), ops.pack(randn(75, 8)))


@pytest.mark.parametrize(("rows", "k"), [(1, 576), (3, 13), (70, 600)])
def test_rms_norm(ops: Ops, rows: int, k: int) -> None:
    x, weight = randn(rows, k, seed=1) * 5, randn(k, seed=2)
    assert_close(ops.rms_norm(x, weight, 1e-5), EXACT.rms_norm(x.double(), weight.double(), 1e-5), 5e-7)
    tiny = x * 1e-6
    assert_close(ops.rms_norm(tiny, weight, 1e-5), EXACT.rms_norm(tiny.double(), weight.double(), 1e-5), 5e-7)


@pytest.mark.parametrize(("rows", "k"), [(1, 576), (3, 13), (70, 600)])
def test_layer_norm(ops: Ops, rows: int, k: int) -> None:
    x, weight = randn(rows, k, seed=1) * 5 + 3, randn(k, seed=2)
    exact = torch.nn.functional.layer_norm(x.double(), (k,), weight.double(), eps=1e-5)
    assert_close(ops.layer_norm(x, weight, 1e-5), exact, 1e-6)


@pytest.mark.parametrize(("rows", "f"), [(1, 1536), (3, 13), (70, 601)])
def test_silu_mul(ops: Ops, rows: int, f: int) -> None:
    gate_up = randn(rows, 2 * f) * 20
    exact = EXACT.silu_mul(gate_up.double())
    error = (ops.silu_mul(gate_up).double() - exact).abs() / exact.abs().clamp_min(1e-30)
    assert error.max() <= 8e-7


def test_silu_mul_at_the_ends_of_the_range(ops: Ops) -> None:
    gate = torch.tensor([[0.0, -1e4, 1e4, -88.0, 88.0, float("nan"), float("inf")]])
    out = ops.silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))[0]
    assert torch.equal(out[[0, 2, 4, 6]], gate[0, [0, 2, 4, 6]])
    assert out[[1, 3]].abs().max() < 1e-30
    assert out[5].isnan()


@pytest.mark.parametrize(("rows", "f"), [(1, 1536), (3, 13), (70, 601)])
def test_gelu_tanh_mul(ops: Ops, rows: int, f: int) -> None:
    gate_up = randn(rows, 2 * f)
    for scale in (1, 20):
        gate, up = (gate_up * scale).chunk(2, dim=1)
        exact = EXACT.gelu_tanh_mul((gate_up * scale).double())
        error = (ops.gelu_tanh_mul(gate_up * scale).double() - exact).abs() / (gate * up).abs()
        assert error.max() <= 5e-7


def test_gelu_tanh_mul_at_the_ends_of_the_range(ops: Ops) -> None:
    gate = torch.tensor([[0.0, -1e4, 1e4, -20.0, 20.0, float("nan"), float("inf"), -1e30, 1e30]])
    out = ops.gelu_tanh_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))[0]
    assert torch.equal(out[[0, 2, 4, 6, 8]], gate[0, [0, 2, 4, 6, 8]])
    assert out[[1, 3, 7]].abs().max() < 1e-7
    assert out[5].isnan()


def test_tanh(ops: Ops) -> None:
    x = torch.cat([torch.linspace(-12, 12, 100_003), torch.tensor([1e-20, 0.2, -0.2, -1e30, 1e30])])
    exact = x.double().tanh()
    assert ((ops.activate(x, "tanh").double() - exact).abs() / exact.abs().clamp_min(1e-30)).max() <= 6e-7
    assert ops.activate(torch.tensor([0.0, float("nan")]), "tanh").isnan().tolist() == [False, True]


@pytest.mark.parametrize("activation", ["exp", "sigmoid", "softplus"])
def test_positive_activations(ops: Ops, activation: Activation) -> None:
    x = torch.cat([torch.linspace(-60, 30, 100_003), torch.tensor([0.0, 1e-20, -1e-20, -87.0])])
    exact = EXACT.activate(x.double(), activation)
    assert ((ops.activate(x, activation).double() - exact).abs() / exact).max() <= 5e-7
    out = ops.activate(torch.tensor([-1e30, float("-inf"), float("nan")]), activation)
    assert out[:2].abs().max() < 2e-38
    assert out[2].isnan()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "silu"])
def test_activate(ops: Ops, activation: Activation) -> None:
    x = torch.cat([torch.linspace(-9, 9, 100_003), torch.tensor([0.0, 1e-20, 0.927734375, 1.312, -1.312])])
    exact = EXACT.activate(x.double(), activation)
    error = (ops.activate(x, activation).double() - exact).abs() / x.abs().clamp_min(1e-30)
    assert error.max() <= 5e-7
    assert ops.activate(x[:12].view(3, 2, 2), activation).shape == (3, 2, 2)
    ends = torch.tensor([-1e30, -1e4, 1e4, 1e30, float("nan")])
    out = ops.activate(ends, activation)
    assert torch.equal(out[2:4], ends[2:4])
    assert out[:2].abs().max() < 1e-7
    assert out[4].isnan()
