"""What is written is LLaVA: transformers and firstlight's own engine compute from it what was trained."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, LlavaForConditionalGeneration
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from scheduler.config import SchedulerConfig
from server.embedded import embedded_path
from server.prompt.source import read_source
from tests.vision.embedded.tiny import SMALL, language_weights, make_language, make_seer
from tests.vlm_engine import Engine, Gateway, request
from vision.embedded.align import Seer
from vision.embedded.export import write_eyes, write_merged
from vision.embedded.painter import Painter
from vision.embedded.questions import Question
from vision.embedded.scene import Scene
from vision.embedded.turns import IMAGE_TOKEN, turns

pytestmark = pytest.mark.model
QUESTION = "What is this?"


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return make_language()


@pytest.fixture(scope="module")
def seer(reference: LlamaForCausalLM) -> Seer:
    """With adapters that change something."""
    found = make_seer(reference)
    for name, parameter in found.language.adapters.named_parameters():
        if name.endswith(".b"):
            torch.nn.init.normal_(parameter, std=0.05)
    torch.nn.init.normal_(found.projector.linear_2.weight, std=0.1)
    return found


@pytest.fixture(scope="module")
def scene(painter: Painter) -> Scene:
    return painter.scene(0, 0, "shapes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, seer: Seer, reference: LlamaForCausalLM) -> Path:
    path = tmp_path_factory.mktemp("merged")
    source = read_source(embedded_path())
    write_merged(path, seer.tower, seer.projector, seer.language.adapters, language_weights(reference), source)
    return path


def logits_of_transformers(folder: Path, ids: torch.Tensor, picture: Image.Image) -> torch.Tensor:
    """Float32 [T, vocabulary]."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = LlavaImageProcessorPil.from_pretrained(folder)
    pixels = processor([picture], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids[None], pixel_values=pixels).logits[0]
    return logits


def test_transformers_and_the_engine_compute_what_was_trained(folder: Path, seer: Seer, scene: Scene) -> None:
    picture = Image.fromarray(scene.pixels)
    asked = turns(seer.tokenizer, [Question("a", QUESTION, "red")], SMALL.grid**2)
    before = asked.ids[: int((asked.wanted >= 0).nonzero()[0]) + 1]
    expected = logits_of_transformers(folder, asked.ids, picture)

    with torch.no_grad():
        trained, wanted, _ = seer.answers([asked], seer.features([scene]))
    rows = expected[asked.wanted >= 0]
    assert len(wanted) == 2
    # bfloat16 against float32
    assert float((trained - rows).abs().max()) < 0.03 * float(rows.abs().max())

    gateway, engine = Gateway(folder), Engine(folder, SchedulerConfig(), activation_dtype="float32")
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt = gateway.prompt([{"role": "user", "content": parts}], [picture])
    assert list(prompt.ids) == before.tolist() and list(prompt.ids).count(IMAGE_TOKEN) == SMALL.grid**2
    other = gateway.prompt([{"role": "user", "content": parts[::-1]}], [picture])
    assert list(other.ids) == list(prompt.ids)
    _, found = engine.logits_of(request(1, prompt, 1))
    assert float((found - expected[: len(found)]).abs().max()) < 1e-4


def test_a_tall_picture_is_padded(folder: Path) -> None:
    pixels = LlavaImageProcessorPil.from_pretrained(folder)([Image.new("RGB", (64, 128), "red")], return_tensors="pt")
    found = pixels["pixel_values"][0]
    assert found.shape == (3, 128, 128)
    assert found[:, 64, 64].tolist() == [1, -1, -1] and float(found[:, 64, 2].abs().max()) < 0.01


def test_the_eyes_alone_and_their_adapters(
    tmp_path: Path, folder: Path, seer: Seer, reference: LlamaForCausalLM
) -> None:
    weights = language_weights(reference)
    write_eyes(tmp_path, seer.tower, seer.projector, seer.language.adapters, weights)
    eyes, changes = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "adapter_model.safetensors")
    assert {value.dtype for value in (*eyes.values(), *changes.values())} == {torch.bfloat16}
    merged = load_file(folder / "model.safetensors")
    assert merged.keys() == eyes.keys() | {f"language_model.{name}" for name in weights}
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    name = "model.layers.1.self_attn.v_proj"
    low, high = (changes[f"base_model.model.{name}.{part}.weight"].float() for part in ("lora_A", "lora_B"))
    product = high @ low * values["lora_alpha"] / values["r"]
    torch.testing.assert_close(
        merged[f"language_model.{name}.weight"] - weights[f"{name}.weight"].float(), product, rtol=0.05, atol=2e-3
    )


def test_the_adapters_beside_the_language_model_are_for_pictures_alone(
    tmp_path: Path, folder: Path, seer: Seer, reference: LlamaForCausalLM, scene: Scene
) -> None:
    weights = language_weights(reference)
    write_eyes(tmp_path, seer.tower, seer.projector, seer.language.adapters, weights)
    language = {f"language_model.{name}": value.float().contiguous() for name, value in weights.items()}
    save_file({**load_file(tmp_path / "model.safetensors"), **language}, tmp_path / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    gateway, engine = Gateway(folder), Engine(tmp_path, SchedulerConfig(), activation_dtype="float32")
    text = {"type": "text", "text": QUESTION}
    seeing = gateway.prompt([{"role": "user", "content": [{"type": "image"}, text]}], [Image.fromarray(scene.pixels)])
    _, merged = Engine(folder, SchedulerConfig(), activation_dtype="float32").logits_of(request(0, seeing, 1))
    _, found = engine.logits_of(request(0, seeing, 1))
    # eyes and adapters in bfloat16 against float32
    assert float((found - merged).abs().max()) < 0.03 * float(merged.abs().max())
    reading = gateway.prompt([{"role": "user", "content": [text]}], [])
    _, found = engine.logits_of(request(1, reading, 1))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).unlink()
    without = Engine(tmp_path, SchedulerConfig(), activation_dtype="float32")
    assert torch.equal(found, without.logits_of(request(1, reading, 1))[1])
    _, unchanged = without.logits_of(request(0, seeing, 1))
    assert float((unchanged[-1] - merged[-1]).abs().max()) > 0.1 * float(merged[-1].abs().max())
