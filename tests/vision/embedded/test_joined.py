"""The embedded model's file and eyes in a folder of their own answer as the checkpoint that both are merged into, which
transformers runs; and text as the embedded model alone."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from model_runtime.opening import Opened, open_checkpoint
from model_runtime.weights.errors import CheckpointError
from server.embedded import EmbeddedModelMissing, embedded_mmproj, embedded_path
from tests.vision.embedded.compare import CONFIG, Pair, asked
from tests.vision.embedded.tiny import write_random_eyes
from tests.vlm_engine import Engine, Gateway, Outcome, request
from vision.embedded.export import FILES
from vision.embedded.language import read_weights
from vision.embedded.painter import Painter

pytestmark = pytest.mark.model
STEPS = 12


@dataclass(frozen=True)
class Files:
    eyes: Path
    merged: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("joined")
    found = Files(folder / "eyes", folder / "merged")
    write_random_eyes(found.eyes, read_weights(), found.merged)
    return found


@pytest.fixture(scope="module")
def picture(painter: Painter) -> Image.Image:
    return Image.fromarray(painter.scene(0, 0, "shapes").pixels)


def test_answers_about_pictures_are_those_of_transformers(files: Files, picture: Image.Image) -> None:
    """As the eyes in bfloat16 are what is merged, they differ by the rounding of float32 sums alone."""
    pair = Pair(files.eyes, files.merged)
    prompts = [asked(gateway, "What is this?", picture) for gateway in (pair.gateway, Gateway(files.merged))]
    assert prompts[0].ids == prompts[1].ids
    found = pair.compare("What is this?", picture, STEPS)
    assert len(found.token_ids) == STEPS and found.token_ids == found.expected_ids
    assert found.distance < 1e-4


def test_text_beside_pictures_is_that_of_the_model_alone(files: Files, picture: Image.Image) -> None:
    """Bit for bit, as usually served."""
    gateway, engine = Gateway(embedded_path(), files.eyes), Engine(embedded_path(), CONFIG, mmproj=files.eyes)
    texts = ("What is the capital of France?", "Write a line about the sea.")
    plain = [request(at, asked(gateway, text, None), STEPS) for at, text in enumerate(texts)]
    seeing = [request(2 + at, asked(gateway, text, picture), STEPS) for at, text in enumerate(texts)]
    together = engine.run([plain[0], seeing[0], plain[1], seeing[1]])
    assert engine.largest_batch == 4

    def seen(outcome: Outcome) -> tuple[object, ...]:
        return outcome.token_ids, outcome.logprobs

    alone = Engine(embedded_path(), CONFIG)
    for one in plain:
        assert seen(together[one.seq_id]) == seen(alone.run([one])[one.seq_id])
    assert together[0].token_ids != together[2].token_ids


def refused(files: Files, folder: Path, values: dict[str, object]) -> str:
    """Why eyes with other values in config.json do not fit."""
    shutil.copytree(files.eyes, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(embedded_path(), folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_size", 960, "its text_config has hidden_size 960, the model 576"),
        ("num_hidden_layers", 32, "its text_config has num_layers 32, the model 30"),
        ("vocab_size", 49153, "its text_config has vocab_size 49153, the model 49152"),
    ],
)
def test_eyes_of_another_language_model_are_refused(
    files: Files, tmp_path: Path, name: str, value: int, message: str
) -> None:
    text = json.loads((files.eyes / "config.json").read_text())["text_config"]
    assert message in refused(files, tmp_path, {"text_config": {**text, name: value}})


def test_what_is_no_image_side_is_refused(files: Files, tmp_path: Path) -> None:
    assert "model_type 'llama' takes no images" in refused(files, tmp_path, {"model_type": "llama"})
    assert "the image token 49152 exceeds the vocabulary" in refused(files, tmp_path, {"image_token_index": 49152})
    with pytest.raises(CheckpointError, match="takes images by itself: leave out"):
        open_checkpoint(files.merged, files.eyes)
    with pytest.raises(CheckpointError, match=r"holds a language model .* serve it by itself, as MODEL"):
        open_checkpoint(embedded_path(), files.merged)
    with pytest.raises(CheckpointError, match=r"has no config.json: .*llama.cpp, \*.gguf, are not read"):
        open_checkpoint(embedded_path(), embedded_path())
    tensors = load_file(files.eyes / "model.safetensors")
    shutil.copytree(files.eyes, tmp_path, dirs_exist_ok=True)
    del tensors["multi_modal_projector.linear_2.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing is multi_modal_projector.linear_2.weight"):
        Engine(embedded_path(), CONFIG, mmproj=tmp_path)


def test_what_was_opened_says_so(files: Files) -> None:
    opened: Opened = open_checkpoint(embedded_path(), files.eyes)
    assert opened.family == "llama, images by eyes" and opened.image_folder == files.eyes
    assert opened.config.adapter is not None and opened.config.adapter.rank == 16


def test_the_files_are_checked(files: Files, tmp_path: Path) -> None:
    assert embedded_mmproj(files.eyes) == str(files.eyes)
    assert embedded_mmproj(tmp_path) == ""
    assert sorted(file.name for file in files.eyes.iterdir()) == sorted([*FILES, "SHA256SUMS"])
    shutil.copytree(files.eyes, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(1000)
        file.write(b"other")
    with pytest.raises(EmbeddedModelMissing, match=r"model.safetensors is not what SHA256SUMS records"):
        embedded_mmproj(tmp_path)
