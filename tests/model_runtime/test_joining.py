"""An image side apart and a model of text are one model: the checkpoint that they were, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest

from model_runtime.config import RuntimeConfig
from model_runtime.device import choose_device
from model_runtime.layout import layout_of
from model_runtime.memory.planning import plan_rank
from model_runtime.opening import open_checkpoint
from model_runtime.ops import load_ops
from model_runtime.weights.errors import CheckpointError
from scheduler.config import SchedulerConfig
from tests.adapters import write_adapter
from tests.apart import write_apart
from tests.vision.preprocess_pictures import as_pil, picture
from tests.vlm import make_vlm
from tests.vlm_engine import Engine, Gateway, request

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=40, block_size=8)
PICTURE = as_pil(picture(60, 100, 0))
CONTENT = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
STEPS = 8


def make_apart(folder: Path, name: str, *, adapted: bool = True) -> tuple[Path, Path, Path]:
    """The whole checkpoint, with an adapter, and its two sides."""
    whole, text, images = folder / "whole", folder / "text", folder / "images"
    whole.mkdir()
    model = make_vlm(whole, name)
    if adapted:
        write_adapter(whole, model)
    write_apart(whole, text, images)
    for file in whole.glob("adapter_*"):
        shutil.copy(file, images / file.name)
    return whole, text, images


@pytest.mark.parametrize(("name", "adapted"), [("llava-siglip", True), ("llava_next", True), ("idefics3", False)])
def test_they_are_one(tmp_path: Path, name: str, adapted: bool) -> None:
    whole, text, images = make_apart(tmp_path, name, adapted=adapted)
    messages = [{"role": "user", "content": CONTENT}]
    prompt, expected = Gateway(text, images).prompt(messages, [PICTURE]), Gateway(whole).prompt(messages, [PICTURE])
    assert (prompt.ids, prompt.images) == (expected.ids, expected.images)
    both = Engine(text, CONFIG, mmproj=images).run([request(0, prompt, STEPS)])[0]
    one = Engine(whole, CONFIG).run([request(0, expected, STEPS)])[0]
    assert (both.token_ids, both.logprobs) == (one.token_ids, one.logprobs)
    assert len(both.token_ids) == STEPS


def test_memory_is_planned_as_for_one(tmp_path: Path) -> None:
    whole, text, images = make_apart(tmp_path, "llava-siglip")
    runtime, device = RuntimeConfig(tensor_parallel_size=2, encoder_cache_bytes=2**20), choose_device("cpu")
    ops = load_ops(device, "auto")
    planned = [
        plan_rank(opened, layout_of(runtime), runtime, CONFIG, device, ops, 2**30)[0]
        for opened in (open_checkpoint(text, images), open_checkpoint(whole))
    ]
    assert planned[0] == planned[1]
    assert planned[0].images is not None and sum(planned[0].vision.values()) > 0


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "qwen3_vl"])
def test_language_models_of_their_own_are_refused(tmp_path: Path, name: str) -> None:
    """Which attend otherwise to images, turn by rows and columns, or get more than embeddings."""
    make_vlm(tmp_path / "whole", name)
    write_apart(tmp_path / "whole", tmp_path / "text", tmp_path / "images")
    config = json.loads((tmp_path / "images" / "config.json").read_text())["text_config"]
    plain = {"model_type": "llama", "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 64}
    sizes = {key: config[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    (tmp_path / "text" / "config.json").write_text(json.dumps({**plain, **sizes}))
    with pytest.raises(CheckpointError, match="needs a language model that was made for its images"):
        open_checkpoint(tmp_path / "text", tmp_path / "images")


def test_prepared_weights_are_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another adapter in the same place gives other answers, though weights are kept."""
    monkeypatch.setattr("model_runtime.weights.prepared.SMALLEST", 0)
    monkeypatch.setenv("FIRSTLIGHT_CACHE_DIR", str(tmp_path / "cache"))
    _, text, images = make_apart(tmp_path, "llava-siglip")
    prompt = Gateway(text, images).prompt([{"role": "user", "content": CONTENT}], [PICTURE])
    first = Engine(text, CONFIG, mmproj=images).run([request(0, prompt, STEPS)])[0]
    config = json.loads((images / "adapter_config.json").read_text())
    (images / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 3 * config["lora_alpha"]}))
    other = Engine(text, CONFIG, mmproj=images).run([request(0, prompt, STEPS)])[0]
    assert [entry.value for entry in first.logprobs] != [entry.value for entry in other.logprobs]
    assert list((tmp_path / "cache" / "prepared").glob("weights-*.bin"))
