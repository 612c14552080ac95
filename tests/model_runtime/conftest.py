"""What operations are tested: all that run on this machine. Tests on a GPU are skipped where there is none, apart from
those that also run on CPU with a stand-in."""

import pytest
import torch

from model_runtime.ops import cuda
from model_runtime.ops.registry import Ops
from tests.model_runtime.flash import GPU, stand_in
from tests.model_runtime.op_cases import EXACT, compiled


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not GPU:
        pytest.skip("there is no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where a GPU's operations run; on CPU with the stand-in."""
    if request.param == "cpu":
        monkeypatch.setattr(cuda, "flash_attention", lambda: stand_in)
    return torch.device(request.param)


@pytest.fixture(params=["reference", "auto"])
def ops(request: pytest.FixtureRequest) -> Ops:
    """Each implementation that runs on CPU."""
    return EXACT if request.param == "reference" else compiled()
