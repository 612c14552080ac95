"""transformers reads the model of noise that `firstlight doctor --make-tiny-vlm` writes, and computes our logits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from scheduler.config import SchedulerConfig
from server.tiny_vlm import write_tiny_vlm
from tests.vision.preprocess_pictures import as_pil, picture
from tests.vlm_engine import Engine, Gateway, request

EMBEDDINGS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny_vlm(path)
    return path


def expected_logits(folder: Path, images: list[Image.Image]) -> tuple[list[int], torch.Tensor]:
    model, loading = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), "every weight is known and none is missing"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pixels = AutoImageProcessor.from_pretrained(folder, backend="pil")(images, return_tensors="pt")["pixel_values"]
    text = "<s>USER: Who is <image>\nor <image>\n?\nASSISTANT: ".replace("<image>", "<image>" * EMBEDDINGS)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        return ids, model(input_ids=torch.tensor([ids]), pixel_values=pixels).logits[0]


def test_transformers_reads_it_and_gives_the_same_logits(folder: Path) -> None:
    images = [as_pil(picture(90, 60, 0)), as_pil(picture(50, 80, 1))]
    ids, logits_LV = expected_logits(folder, images)
    parts = [
        {"type": "text", "text": "Who is "},
        {"type": "image"},
        {"type": "text", "text": "or "},
        {"type": "image"},
        {"type": "text", "text": "?"},
    ]
    prompt = Gateway(folder).prompt([{"role": "user", "content": parts}], images)
    assert list(prompt.ids) == ids
    outcome, found_LV = Engine(folder, SchedulerConfig(max_num_seqs=4)).logits_of(request(0, prompt, 1))
    assert (found_LV - logits_LV).abs().max().item() <= 1e-4
    assert outcome.token_ids == [int(logits_LV[-1].argmax())]


def command(folder: Path) -> "subprocess.CompletedProcess[str]":
    arguments = [sys.executable, "-m", "server.cli", "doctor", "--make-tiny-vlm", str(folder)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_says_that_the_words_are_noise(folder: Path, tmp_path: Path) -> None:
    made = command(tmp_path / "new" / "model")
    assert (made.returncode, made.stderr) == (0, "")
    assert "its words are noise" in made.stdout and f"firstlight serve {tmp_path}/new/model" in made.stdout
    names = {path.name for path in folder.iterdir()}
    for name in names:
        assert (tmp_path / "new" / "model" / name).read_bytes() == (folder / name).read_bytes()
    again = command(tmp_path / "new" / "model")
    assert again.returncode == 1 and "is not empty" in again.stderr and again.stdout == ""
