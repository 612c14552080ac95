"""Layers in host memory: logits are those of the resident model bit for bit, what is on the device is two buffers, and
what is planned is what is loaded. On CPU with copies as late as a device may make them; on a GPU with its own."""

import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_runtime import offload as mechanism
from model_runtime.caches import allocate_caches
from model_runtime.checkpoint import LoadedModel, load_model
from model_runtime.config import RuntimeConfig
from model_runtime.executor import load_executor
from model_runtime.graphs import on_device
from model_runtime.layout import Layout
from model_runtime.memory import planning
from model_runtime.memory.budget import PlanError
from model_runtime.memory.offload import BUFFERS, Offload, refused_offload, ways
from model_runtime.memory.planning import Outline, plan_rank
from model_runtime.opening import open_checkpoint
from model_runtime.ops import load_ops
from model_runtime.ops.registry import Ops, PackedWeight, select
from model_runtime.stages import rank_shares
from model_runtime.weights import load
from model_runtime.weights.load import EXACT, Precision
from scheduler.config import SchedulerConfig
from tests.checkpoints import HYBRID, make_checkpoint
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.test_device import SCHEDULER, answers
from tests.vlm_engine import Engine

NUM_LAYERS = 6
MODELS: dict[str, dict[str, object]] = {
    "llama": {"num_hidden_layers": NUM_LAYERS, "attention_bias": True, "mlp_bias": True},
    "gemma3_text": {"num_hidden_layers": NUM_LAYERS, "sliding_window": 8, "sliding_window_pattern": 2},
    "qwen3_next": HYBRID | {"num_hidden_layers": NUM_LAYERS, "layer_types": ["linear_attention", "full_attention"] * 3},
}
"""Of dense layers, and of layers with experts, half of which have states."""
INT8 = Precision(quantization="int8")
STEPS: tuple[dict[int, list[int]], ...] = (
    {0: [5, 6, 7, 8, 9]},
    {0: [10], 1: [*range(3, 40)]},
    {0: [11], 1: [*range(40, 60)], 2: [7]},
    {2: [8], 0: [12], 1: [13]},
    {2: [9]},
)
"""A prompt; decoding beside another prompt and its second chunk; a batch that decodes; one alone."""


class LateCopies:
    """Numbers come when somebody waits for them, and what was in the buffer is gone at once."""

    def __init__(self) -> None:
        self.begun: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_bytes: list[int] = []

    def start(self, buffer: int, target: Tensor, source: Tensor) -> None:
        target.fill_(255)  # NaN, of floats
        self.begun[buffer] = target, source
        self.num_bytes.append(len(source))

    def wait(self, buffer: int) -> None:
        if buffer in self.begun:
            target, source = self.begun.pop(buffer)
            target.copy_(source)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {family: tmp_path_factory.mktemp(family) for family in MODELS}
    for family, folder in made.items():
        make_checkpoint(folder, family, MODELS[family])
    return made


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    copies = LateCopies()
    monkeypatch.setattr(load, "PlainCopies", lambda: copies)
    return copies


def way(folder: Path, ops: Ops, how: Precision, num_layers: int) -> Offload:
    """To leave so many layers on the host."""
    opened = open_checkpoint(folder)
    (share,) = rank_shares(opened.config, (1, 1, 1), whole_experts=False)
    found = ways(Outline(opened).weights(share, how, ops).layers)
    return next(way for way in found if len(way.layers) == num_layers)


def loaded(folder: Path, ops: Ops, how: Precision = EXACT, num_layers: int = 0) -> LoadedModel:
    chosen = way(folder, ops, how, num_layers) if num_layers else None
    return load_model(folder, ops, DEVICE, lambda fraction: None, precision=how, offload=chosen)


def logits(run: PagedRun) -> list[Tensor]:
    return [rows_TV for step in STEPS for rows_TV in run.step(step).values()]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) == sum(map(len, STEPS))
    for found_TV, expected_TV in zip(found, expected, strict=True):
        assert expected_TV.isfinite().all() and torch.equal(found_TV, expected_TV)


@pytest.mark.parametrize(
    ("family", "kernels", "how", "num_layers"),
    [
        ("llama", "reference", EXACT, 3),
        ("llama", "reference", EXACT, 4),
        ("llama", "auto", EXACT, NUM_LAYERS),
        ("llama", "auto", INT8, 5),
        ("gemma3_text", "reference", INT8, 5),
        ("qwen3_next", "reference", EXACT, 4),
    ],
)
def test_logits_are_those_of_the_resident_model(
    family: str, kernels: str, how: Precision, num_layers: int, folders: dict[str, Path], late: LateCopies
) -> None:
    """In prompts, chunks, batches and when a sequence is decoded."""
    ops = load_ops(DEVICE, kernels)
    resident, offloaded = loaded(folders[family], ops, how), loaded(folders[family], ops, how, num_layers)
    assert_same(logits(PagedRun(offloaded.decoder)), logits(PagedRun(resident.decoder)))
    assert len(late.num_bytes) >= num_layers


def test_plain_copies(folders: dict[str, Path]) -> None:
    ops = select("any")
    offloaded = loaded(folders["llama"], ops, EXACT, 5)
    assert_same(logits(PagedRun(offloaded.decoder)), logits(PagedRun(loaded(folders["llama"], ops).decoder)))


@pytest.mark.parametrize("num_layers", [3, 4, 5])
def test_a_step_copies_what_is_planned(num_layers: int, folders: dict[str, Path], late: LateCopies) -> None:
    model = loaded(folders["llama"], select("any"), EXACT, num_layers)
    run = PagedRun(model.decoder)
    assert len(late.num_bytes) == BUFFERS, "the first two are on their way before there is a step"
    for tokens in ([3, 4], [5]):
        late.num_bytes.clear()
        run.step({0: tokens})
        assert sum(late.num_bytes) == way(folders["llama"], select("any"), EXACT, num_layers).copied_bytes
    assert sorted(late.begun) == ([0] if num_layers == 3 else [0, 1]), "and those of the next step"


def test_the_step_after_one_that_failed(
    folders: dict[str, Path], late: LateCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident, offloaded = (loaded(folders["llama"], select("any"), EXACT, count) for count in (0, 5))
    for layer in range(NUM_LAYERS):
        with monkeypatch.context() as patch:
            patch.setattr(offloaded.decoder.layers[layer].mlp, "forward", lambda ops, x_TC: {}["lost"])
            with pytest.raises(KeyError, match="lost"):
                PagedRun(offloaded.decoder).step({0: [3, 4, 5]})
        assert_same(logits(PagedRun(offloaded.decoder)), logits(PagedRun(resident.decoder)))


def storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Bytes by address."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize(("family", "how"), [("llama", EXACT), ("llama", INT8), ("qwen3_next", EXACT)])
def test_the_device_holds_two_buffers_and_the_rest(family: str, how: Precision, folders: dict[str, Path]) -> None:
    ops, count = select("any"), 4
    chosen, model = way(folders[family], ops, how, count), loaded(folders[family], ops, how, count)
    parameters, resident = model.decoder.parameters, loaded(folders[family], ops, how).decoder.parameters
    prefixes = tuple(f"layers.{layer}." for layer in chosen.layers)
    staged = [matrix.data for name, matrix in parameters.matrices.items() if name.startswith(prefixes)]
    others = [matrix.data for name, matrix in parameters.matrices.items() if not name.startswith(prefixes)]
    assert sorted(storages(staged).values()) == [chosen.buffer_bytes] * BUFFERS
    assert sum(tensor.nbytes for tensor in staged) == chosen.taken_bytes > chosen.device_bytes
    on_device = storages([*staged, *others, *parameters.vectors.values()])
    assert sum(on_device.values()) == parameters.num_bytes == model.weight_bytes
    assert parameters.num_bytes == resident.num_bytes - chosen.saved_bytes < resident.num_bytes
    assert parameters.staging is not None and parameters.matrices.keys() == resident.matrices.keys()
    hosts = storages(parameters.staging._hosts)
    assert len(hosts) == count and sum(hosts.values()) == chosen.host_bytes
    assert not hosts.keys() & on_device.keys()


def test_a_tied_embedding_and_vectors_stay(folders: dict[str, Path]) -> None:
    """Of the first layer, where the embedding is, too."""
    parameters = loaded(folders["gemma3_text"], select("any"), EXACT, NUM_LAYERS).decoder.parameters
    assert "head" not in parameters.matrices
    buffers = storages([parameters.matrices["layers.0.attention.qkv.weight"].data])
    assert not buffers.keys() & storages([parameters.matrices["embedding"].data, *parameters.vectors.values()]).keys()


def test_a_host_that_fails_while_layers_are_moved(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []
    moved, matrices_of = mechanism._moved, {}

    def failing(matrices: dict[str, PackedWeight], names: Sequence[str], buffer: Tensor) -> Tensor:
        matrices_of["them"] = matrices
        if len(made) == 2:
            raise MemoryError("no more")
        host = moved(matrices, names, buffer)
        made.append(weakref.ref(host))
        return host

    monkeypatch.setattr(mechanism, "_moved", failing)
    with pytest.raises(MemoryError, match="no more") as held:
        loaded(folders["llama"], select("any"), EXACT, 5)
    assert len(made) == 2 and all(reference() is None for reference in made), "while the error is handled"
    assert not matrices_of["them"] and held.traceback


@pytest.mark.parametrize("how", [EXACT, INT8])
def test_weights_on_the_device_are_what_is_planned(how: Precision, folders: dict[str, Path]) -> None:
    """To the byte, as for a GPU."""
    runtime = RuntimeConfig(offload_weights=300_000 if how is EXACT else 90_000, quantization=how.quantization)
    opened, ops, cuda = open_checkpoint(folders["llama"]), select("cuda"), torch.device("cuda")
    arguments = SchedulerConfig(block_size=256), cuda, ops, 2**30
    needs, _ = plan_rank(opened, Layout(rank=0, tensor_size=1, context_size=1, pipeline_size=1), runtime, *arguments)
    assert needs.offload is not None and needs.offload.host_bytes >= runtime.offload_weights
    model = load_model(opened, ops, DEVICE, lambda fraction: None, precision=how, offload=needs.offload)
    assert model.weight_bytes == needs.weight_bytes < needs.weights.total
    assert model.description.endswith(" MiB in host memory")


def test_what_is_refused(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = RuntimeConfig(offload_weights=300_000)
    with pytest.raises(PlanError, match="memory of their own, and that of the CPU is the host's: leave it out"):
        load_executor(folders["llama"], runtime, SCHEDULER, lambda stage, fraction: None)
    opened = open_checkpoint(folders["llama"])
    mixing = replace(opened.config, depth_group=2)
    assert "not supported for block attention residuals" in refused_offload(mixing, runtime, "cuda")
    assert refused_offload(opened.config, runtime, "cuda") == refused_offload(mixing, RuntimeConfig(), "cpu") == ""
    monkeypatch.setattr(planning, "available_memory", lambda: 100_000)
    layout = Layout(rank=0, tensor_size=1, context_size=1, pipeline_size=1)
    with pytest.raises(PlanError, match=r"leaves .* bytes in host memory, where 100000 are free: set it to less"):
        plan_rank(opened, layout, runtime, SchedulerConfig(block_size=256), torch.device("cuda"), select("cuda"), 2**30)
    with pytest.raises(ValueError, match="offload_weights must not be negative"):
        RuntimeConfig(offload_weights=-1)


def test_graphs_are_left_out(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    """A capture would fail here, for want of a card."""
    decoder = loaded(folders["llama"], select("cuda"), EXACT, 4).decoder
    decoder.dtype = torch.bfloat16
    kv = allocate_caches(decoder.own, 4, 256, torch.bfloat16, DEVICE)
    with caplog.at_level(logging.INFO):
        on_device(decoder, kv, max_model_len=256, max_num_seqs=2)
    assert "layers in host memory: steps are not captured in graphs" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_answers_as_with_all_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """Twice, so that the first step of one comes upon what the last of another left in the buffers."""
    make_checkpoint(tmp_path, "llama", MODELS["llama"] | {"max_position_embeddings": 1024}, dtype)
    resident = answers(tmp_path, Engine(tmp_path, SCHEDULER, device="cuda", num_kv_blocks=64))
    engine = Engine(tmp_path, SCHEDULER, device="cuda", num_kv_blocks=64, offload_weights=200_000)
    for _ in range(2):
        found = answers(tmp_path, engine)
        assert [one.token_ids for one in found.values()] == [one.token_ids for one in resident.values()]
