"""Loading fills every parameter once and uses every key once, or says which not."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_runtime.checkpoint import LoadedModel, load_model
from model_runtime.ops import load_ops
from model_runtime.share import split
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.load import load_parameters
from model_runtime.weights.safetensors_source import read_safetensors
from model_runtime.weights.source import Index, Numbers, whole
from model_runtime.weights.table import Parameter, Slot, linear_table
from tests.checkpoints import make_checkpoint
from tests.model_runtime.memory import MODEL
from tests.model_runtime.paged import DEVICE, PagedRun

OPS = load_ops(DEVICE, "reference")
(WHOLE,) = split(MODEL, 1)
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def load(folder: Path) -> LoadedModel:
    return load_model(folder, OPS, DEVICE, lambda fraction: None)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama", {})
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, "llama", {}, max_shard_size="60KB")
    return tmp_path


def edit(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of an unsharded checkpoint."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {key: value for key, value in change.items() if value is not None}
    save_file({key: tensors[key] for key in tensors if change.get(key, 0) is not None}, path)


def edit_index(folder: Path, change: dict[str, str | None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    merged = index["weight_map"] | change
    index["weight_map"] = {key: name for key, name in merged.items() if name is not None}
    (folder / INDEX).write_text(json.dumps(index))


def test_sharded_and_single_give_the_same_bits(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one", "qwen2", {})
    make_checkpoint(tmp_path / "many", "qwen2", {}, max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 4
    prompt = list(range(3, 40))
    logits = [PagedRun(load(tmp_path / name).decoder).step({0: prompt})[0] for name in ("one", "many")]
    assert torch.equal(logits[0], logits[1])


def test_fused_rows_are_stacked_in_order(single: Path) -> None:
    tensors = load_file(single / "model.safetensors")
    layer = load(single).decoder.layers[1]
    prefix = "model.layers.1"
    qkv = torch.cat([tensors[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(layer.attention.qkv.weight.data, qkv)
    gate_up = torch.cat([tensors[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(layer.mlp.gate_up.weight.data, gate_up)


def test_progress_rises_to_one(single: Path) -> None:
    seen: list[float] = []
    load_model(single, OPS, DEVICE, seen.append)
    assert seen == sorted(seen)
    assert seen[0] > 0
    assert seen[-1] == 1.0


@pytest.mark.parametrize("key", ["rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_known_leftovers_are_ignored(single: Path, key: str) -> None:
    edit(single, {key: torch.ones(8)})
    assert load(single).config.num_layers == 3


@pytest.mark.parametrize("difference", [0.0, 1.0])
def test_output_matrix_beside_a_tied_embedding(tmp_path: Path, difference: float) -> None:
    """A copy is ignored; a matrix of its own is used as by transformers, also where only its last number is another."""
    head = make_checkpoint(tmp_path, "llama", {"tie_word_embeddings": True}).get_input_embeddings().weight.detach()
    head[-1, -1] += difference
    edit(tmp_path, {"lm_head.weight": head})
    decoder = load(tmp_path).decoder
    assert (decoder.head is decoder.embedding) == (difference == 0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([[5, 6]])).logits[0]
    torch.testing.assert_close(PagedRun(decoder).step({0: [5, 6]})[0], theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({Q_PROJ: None}, f"missing are {Q_PROJ}"),
        ({"lm_head.weight": None}, "missing are lm_head.weight"),
        ({"model.layers.1.self_attn.q_proj.bias": torch.ones(64)}, "unused are model.layers.1.self_attn.q_proj.bias"),
        ({"model.layers.3.mlp.up_proj.weight": torch.ones(2)}, "unused are model.layers.3.mlp.up_proj.weight"),
        ({Q_PROJ: torch.ones(64, 63)}, f"{Q_PROJ} has shape [64, 63]; the architecture needs [64, 64]"),
        ({"model.norm.weight": torch.ones(64, 1)}, "model.norm.weight has shape [64, 1]; the architecture needs [64]"),
        (
            {Q_PROJ: torch.ones(64, 64, dtype=torch.int8)},
            f"{Q_PROJ} is stored as int8; float32, float16, bfloat16 are supported",
        ),
        ({Q_PROJ: torch.full((64, 64), torch.nan)}, f"NaN or infinite weights in {Q_PROJ}"),
        ({"model.norm.weight": torch.full((64,), torch.inf)}, "NaN or infinite weights in model.norm.weight"),
    ],
)
def test_faults_name_the_key(single: Path, change: dict[str, Tensor | None], words: str) -> None:
    edit(single, change)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load(single)


def test_many_missing_keys_are_counted(single: Path) -> None:
    tensors = load_file(single / "model.safetensors")
    edit(single, {key: None for key in tensors if "layers" in key})
    with pytest.raises(
        CheckpointError, match=r"missing are model\.layers\.0\.input_layernorm\.weight, .* and 19 more$"
    ):
        load(single)


def test_missing_and_truncated_shards(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[2]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=f"{shard.name}: truncated or damaged"):
        load(sharded)
    shard.write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{shard.name}: truncated or damaged"):
        load(sharded)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"cannot read .*{shard.name}"):
        load(sharded)


def test_index_that_contradicts_its_shards(sharded: Path) -> None:
    first = min(sharded.glob("*.safetensors")).name
    edit_index(sharded, {"ghost.weight": first})
    with pytest.raises(CheckpointError, match=r"tensors that their files do not hold: ghost\.weight"):
        load(sharded)
    edit_index(sharded, {"ghost.weight": None, Q_PROJ: first})
    with pytest.raises(CheckpointError, match=re.escape(f"holds {Q_PROJ}, which {INDEX} does not place there")):
        load(sharded)
    for name in ("../elsewhere.safetensors", "zero\0.safetensors", "half a pair \ud800.safetensors"):
        edit_index(sharded, {Q_PROJ: name})
        with pytest.raises(CheckpointError, match="is not the name of a file beside it"):
            load(sharded)


def entry(begin: int, end: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, r"b begins at byte \d+, and what comes before it ends at"),
        ({"a": entry(0, 8), "b": entry(0, 12)}, r"b begins at byte \d+, and what comes before it ends at"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, r"b begins at byte \d+, and what comes before it ends at"),
        ({"a": entry(4, 12)}, r"a begins at byte \d+, and what comes before it ends at"),
        ({}, r"its tensors end at byte \d+ and the file at"),
    ],
)
def test_tensors_that_overlap_or_leave_holes(tmp_path: Path, header: dict[str, object], words: str) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    with pytest.raises(CheckpointError, match=words):
        read_safetensors(tmp_path)
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "model.safetensors")


def test_a_key_that_is_there_twice(tmp_path: Path) -> None:
    text = b'{"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},"a":{"dtype":"U8","shape":[6],"data_offsets":[6,12]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    with pytest.raises(CheckpointError, match="a begins at byte"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{", "config.json: not JSON"),
        ("config.json", "[]", "must hold a JSON object"),
        ("config.json", "[" * 100_000, "not JSON"),
        ("generation_config.json", "{", "generation_config.json: not JSON"),
        (INDEX, "{}", "weight_map is missing or empty"),
    ],
)
def test_damaged_json(single: Path, name: str, content: str, words: str) -> None:
    (single / name).write_text(content)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load(single)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a folder"):
        load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        load(tmp_path)
    make_checkpoint(tmp_path, "llama", {})
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        load(tmp_path)


class CountingTensor(Numbers):
    """A made-up tensor; remembers in what order others like it were read, and the bytes behind each target."""

    file = "made up"

    def __init__(self, key: str, shape: tuple[int, ...], reads: list[tuple[str, int]]) -> None:
        self.key, self.shape, self.reads = key, shape, reads
        self.dtype = torch.float16 if key.startswith("half") else torch.bfloat16

    def read_into(self, index: Index, target: Tensor) -> None:
        assert index == whole(self.shape)
        assert target.shape == self.shape
        assert target.is_contiguous()
        self.reads.append((self.key, target.untyped_storage().nbytes()))
        target.fill_(len(self.reads))


def test_slots_are_read_once_into_one_buffer_of_the_widest_type() -> None:
    shapes = {"half.weight": (2, 4), "brain.weight": (3, 4), "half.bias": (2,), "brain.bias": (3,)}
    reads: list[tuple[str, int]] = []
    source = {key: CountingTensor(key, shape, reads) for key, shape in shapes.items()}
    table = linear_table("fused", (Slot("half", 2), Slot("brain", 3)), columns=4, bias=True)
    parameters = load_parameters(table, source, OPS, DEVICE, lambda key: False, lambda fraction: None, WHOLE)
    fused = parameters.linear("fused")
    assert fused.weight.data.dtype == torch.float32
    assert fused.weight.data[:, 0].tolist() == [1, 1, 2, 2, 2]
    assert fused.bias is not None
    assert fused.bias.tolist() == [3, 3, 4, 4, 4]
    assert reads == [("half.weight", 80), ("brain.weight", 80), ("half.bias", 20), ("brain.bias", 20)]
    assert parameters.num_bytes == 100


def test_a_key_declared_twice_is_a_broken_invariant() -> None:
    table = [Parameter(name=name, slots=(Slot("same", 2),)) for name in ("a", "b")]
    source = {"same": CountingTensor("same", (2,), [])}
    with pytest.raises(AssertionError, match="declared twice"):
        load_parameters(table, source, OPS, DEVICE, lambda key: False, lambda fraction: None, WHOLE)
