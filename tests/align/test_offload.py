"""`align` of a model with layers in host memory, on CPU: it passes where they are right, and finds what is wrong in one
of them."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from model_runtime.align import product as products
from model_runtime.align.compare import Alignment, align
from model_runtime.align.prompts import seeded_prompts
from model_runtime.align.reference import Reference
from model_runtime.align.transformers_reference import run_transformers
from model_runtime.config import RuntimeConfig
from model_runtime.memory import planning
from model_runtime.memory.budget import PlanError
from model_runtime.opening import open_checkpoint
from server import cli
from tests.checkpoints import make_checkpoint

RUNTIME = RuntimeConfig(prepare_weights=False, threads=1, offload_weights=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel, Reference]:
    folder = tmp_path_factory.mktemp("offloaded")
    model = make_checkpoint(folder, "qwen3", {})
    config = open_checkpoint(folder).config
    return folder, model, run_transformers(model, config, seeded_prompts((40, 9), config.vocab_size), torch.float32)


def aligned(folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> Alignment:
    monkeypatch.setattr(products, "refused_offload", lambda config, runtime, device_type: "")
    ranks = products.load_ranks(products.open_product(folder, RUNTIME), lambda fraction: None)
    staging = ranks[0].decoder.parameters.staging
    assert staging is not None and staging.offload.layers == (0, 1, 2)
    return align(ranks, reference)


def test_layers_in_host_memory_are_aligned(
    made: tuple[Path, PreTrainedModel, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, reference = made
    found = aligned(folder, reference, monkeypatch)
    assert found.passed and found.same_path == 0.0 and found.suspects == ()


def test_a_matrix_that_is_wrong_is_read_from_the_host(
    made: tuple[Path, PreTrainedModel, Reference], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last layer: after a step its buffer has the first one's."""
    _, model, reference = made
    weight = model.model.layers[2].self_attn.o_proj.weight
    with torch.no_grad():
        weight.copy_(weight.T.clone())
    model.save_pretrained(tmp_path)
    found = aligned(tmp_path, reference, monkeypatch)
    assert not found.passed and found.first is not None
    assert (found.first.layer, found.first.kind) == (2, "linear")
    assert found.suspects == ("the matrix is transposed in the product",)


def test_a_host_without_room(made: tuple[Path, PreTrainedModel, Reference], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "refused_offload", lambda config, runtime, device_type: "")
    monkeypatch.setattr(planning, "available_memory", lambda: 1000)
    opened = products.open_product(made[0], RUNTIME)
    with pytest.raises(PlanError, match=r"offload_weights leaves \d+ bytes in host memory, where 1000 are free"):
        products.load_ranks(opened, lambda fraction: None)


def test_single_operations_are_measured_on_the_device(
    made: tuple[Path, PreTrainedModel, Reference], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["ops", str(made[0]), "--device", "xpu", "--offload-weights", "1GiB"])
    assert ended.value.code == 2
    assert "ops are measured with weights on the device: leave offload_weights out" in capsys.readouterr().err


def test_on_the_cpu_it_is_refused(made: tuple[Path, PreTrainedModel, Reference]) -> None:
    with pytest.raises(PlanError, match="offload_weights is for devices with memory of their own"):
        products.open_product(made[0], RUNTIME)
