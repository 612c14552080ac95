"""A decoder as a GPU runs it: on CPU with a stand-in for flash attention and for captures, on a GPU with both."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_runtime.batch import make_batch
from model_runtime.checkpoint import load_model
from model_runtime.device_batch import upload
from model_runtime.graphs import Capture, DecodeGraphs, DeviceDecoder, Step, cuda_capture, graph_sizes
from model_runtime.kv_store import KVLayer, allocate
from model_runtime.models.decoder import Decoder
from model_runtime.ops import cuda, load_ops
from model_runtime.ops.registry import select
from tests.checkpoints import make_checkpoint
from tests.model_runtime.flash import stand_in, token_major
from tests.model_runtime.op_cases import fill_with_nan
from tests.model_runtime.paged import DEVICE, PagedRun

BLOCK, NUM_BLOCKS, MAX_SEQS, MAX_LEN = 256, 16, 5, 600
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2},
}


def test_sizes_of_graphs() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(5) == (1, 2, 4, 5)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 32, 64)


class Captures:
    """Stands in for `cuda_capture`: replays by running the step again, to where its first result was."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.replayed: list[int] = []

    def __call__(self, step: Step) -> tuple[Callable[[], None], Tensor]:
        result = step()
        self.sizes.append(len(result))

        def replay() -> None:
            self.replayed.append(len(result))
            result.copy_(step())

        return replay, result


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(path, request.param, FAMILIES[request.param] | {"max_position_embeddings": 1024})
    return path


def decoder_on(folder: Path, device: torch.device, dtype: torch.dtype) -> Decoder:
    decoder = load_model(folder, select("cuda"), device, lambda fraction: None).decoder
    decoder.dtype = dtype
    return decoder


def pool(decoder: Decoder, device: torch.device) -> list[KVLayer]:
    """As on a GPU, full of NaN, with a spare block."""
    config = decoder.config
    layers = [
        allocate(
            num_blocks=NUM_BLOCKS + 1,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK,
            dtype=decoder.dtype,
            device=device,
        )
        for _ in range(config.num_layers)
    ]
    fill_with_nan(layers)
    return [token_major(layer, decoder.dtype) for layer in layers] if device.type == "cpu" else layers


class DeviceRun(PagedRun):
    """A paged run through what a GPU has between runner and decoder; `graphs` None: without graphs."""

    def __init__(self, decoder: Decoder, device: torch.device, capture: Capture | None) -> None:
        super().__init__(decoder, BLOCK, NUM_BLOCKS)
        self.kv = pool(decoder, device)
        graphs = None
        if capture is not None:
            with torch.inference_mode():
                graphs = DecodeGraphs(decoder, self.kv, capture, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN)
        self.decoder = DeviceDecoder(decoder, graphs)  # type: ignore[assignment]


CHUNKS: tuple[dict[int, list[int]], ...] = (
    {0: [index % 251 for index in range(300)], 1: [9, 8, 7]},
    {0: [5], 1: [6]},
    {2: [1, 2, 3, 4], 0: [7]},
    {2: [8], 1: [9], 0: [3]},
    {3: [5]},
    {0: [1], 1: [2], 2: [3], 3: [4]},
    {2: [11]},
)
"""Steps by sequence: long and short chunks, tokens alone and together, a sequence that begins with one token."""
ONE_EACH = [1, 3, 4, 5, 6]
"""The steps in which every sequence has one token."""


def steps(run: PagedRun) -> list[Tensor]:
    """Logits of every token of every step, on CPU."""
    return [torch.cat(list(run.step(chunk).values())).cpu() for chunk in CHUNKS]


@pytest.fixture(scope="module")
def exact_steps(folder: Path) -> list[Tensor]:
    """By the reference on CPU, in float32."""
    decoder = load_model(folder, load_ops(DEVICE, "reference"), DEVICE, lambda fraction: None).decoder
    return steps(PagedRun(decoder, BLOCK, NUM_BLOCKS))


def relative_error(actual: Tensor, exact: Tensor) -> float:
    return float((actual - exact).norm() / exact.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06)])
def test_logits_are_those_of_the_cpu(
    folder: Path, exact_steps: list[Tensor], device: torch.device, dtype: torch.dtype, tolerance: float
) -> None:
    found = steps(DeviceRun(decoder_on(folder, device, dtype), device, None))
    for actual, exact in zip(found, exact_steps, strict=True):
        assert actual.dtype == torch.float32
        assert relative_error(actual, exact) <= tolerance


def test_steps_with_graphs_are_those_without(folder: Path, device: torch.device) -> None:
    decoder = decoder_on(folder, device, torch.bfloat16)
    captures = Captures()
    capture = captures if device.type == "cpu" else cuda_capture()
    found, plain = steps(DeviceRun(decoder, device, capture)), steps(DeviceRun(decoder, device, None))
    for actual, expected in zip(found, plain, strict=True):
        assert actual.isfinite().all()
        assert relative_error(actual, expected) <= 0.02
    if device.type == "cpu":
        assert captures.sizes == [5, 4, 2, 1]
        assert captures.replayed == [2, 4, 1, 4, 1], "each takes the smallest graph that holds it"


def test_graphs_leave_the_pool_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fills up is in the spare block: nothing else changes while graphs are captured and sequences are added."""
    monkeypatch.setattr(cuda, "flash_attention", lambda: stand_in)
    run = DeviceRun(decoder_on(folder, DEVICE, torch.bfloat16), DEVICE, Captures())
    for layer in run.kv:
        assert layer.key_NBHD[:NUM_BLOCKS].isnan().all() and layer.value_NBHD[:NUM_BLOCKS].isnan().all()
        assert layer.key_NBHD[NUM_BLOCKS, 0].isfinite().all() and layer.key_NBHD[NUM_BLOCKS, 1:].isnan().all()
    run.step({sequence: [5] for sequence in range(3)})
    used = [run.tables[sequence][0] for sequence in range(3)]
    for layer in run.kv:
        written = ~layer.key_NBHD[:NUM_BLOCKS].isnan().flatten(2).all(dim=2)
        assert written.nonzero().tolist() == [[block, 0] for block in sorted(used)]


@pytest.mark.parametrize("count", [1, 7])
def test_a_step_neither_waits_for_the_device_nor_mixes_devices(folder: Path, count: int) -> None:
    """On torch's device without memory a look at a number fails, and so does a tensor of another device: what passes
    can be captured. Flash attention is torch's own here, which checks the arguments."""
    where = torch.device("meta")
    decoder = decoder_on(folder, where, torch.bfloat16)
    plan = PagedRun(decoder, BLOCK, NUM_BLOCKS).plan({0: [5] * count, 1: [6]})
    hidden = decoder.forward(upload(make_batch(plan, BLOCK), where), pool(decoder, where))
    assert (hidden.device.type, hidden.dtype, hidden.shape) == ("meta", torch.bfloat16, (count + 1, 64))
    assert decoder.logits(hidden).dtype == torch.float32
