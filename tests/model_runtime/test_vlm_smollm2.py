"""Real weights: SmolLM2 with an eye of noise answers text exactly as SmolLM2 does, whatever pictures are about."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from model_runtime.weights.gguf_config import read_gguf_config
from model_runtime.weights.gguf_file import read_gguf
from model_runtime.weights.gguf_source import gguf_tensors
from model_runtime.weights.source import read, whole
from scheduler.config import SchedulerConfig
from scheduler.request import Request
from server.embedded import embedded_path
from server.prompt.source import read_source
from tests.vision.preprocess_pictures import as_pil, picture
from tests.vlm_engine import Engine, Gateway, request
from tests.vlm_oracle import Messages

pytestmark = pytest.mark.model
IMAGE_TOKEN = "<filename>"
"""A control token that no question holds stands for pictures, so that the vocabulary stays as it is."""
HIDDEN, TOWER = 576, 32
QUESTIONS = (
    "What is the capital of France?",
    "Write a line about the sea.",
    "Say: one, two,\n\nthree <filename> <|im_end|>",
)
STEPS = 12
CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, prefill_share=1.0)


def tower_weights() -> dict[str, torch.Tensor]:
    """CLIP of two layers, of which the first is used, and the projector."""
    shapes = {
        "vision_tower.vision_model.embeddings.class_embedding": (TOWER,),
        "vision_tower.vision_model.embeddings.patch_embedding.weight": (TOWER, 3, 7, 7),
        "vision_tower.vision_model.embeddings.position_embedding.weight": (17, TOWER),
        "multi_modal_projector.linear_1.weight": (HIDDEN, TOWER),
        "multi_modal_projector.linear_1.bias": (HIDDEN,),
        "multi_modal_projector.linear_2.weight": (HIDDEN, HIDDEN),
        "multi_modal_projector.linear_2.bias": (HIDDEN,),
    }
    norms = ["pre_layrnorm", "post_layernorm"]
    for layer in (0, 1):
        prefix = f"encoder.layers.{layer}."
        norms += [prefix + "layer_norm1", prefix + "layer_norm2"]
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes[f"vision_tower.vision_model.{prefix}self_attn.{name}.weight"] = (TOWER, TOWER)
            shapes[f"vision_tower.vision_model.{prefix}self_attn.{name}.bias"] = (TOWER,)
        for name, rows, columns in (("fc1", 48, TOWER), ("fc2", TOWER, 48)):
            shapes[f"vision_tower.vision_model.{prefix}mlp.{name}.weight"] = (rows, columns)
            shapes[f"vision_tower.vision_model.{prefix}mlp.{name}.bias"] = (rows,)
    for name in norms:
        shapes |= {f"vision_tower.vision_model.{name}.{kind}": (TOWER,) for kind in ("weight", "bias")}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def language_weights() -> dict[str, torch.Tensor]:
    """The embedded model's, expanded."""
    file = read_gguf(embedded_path())
    stored = gguf_tensors(file, read_gguf_config(file))
    return {f"language_model.{key}": read(tensor, whole(tensor.shape)) for key, tensor in sorted(stored.items())}


def config_values(image_token_id: int) -> dict[str, object]:
    return {
        "model_type": "llava",
        "image_token_index": image_token_id,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "text_config": {
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": HIDDEN,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": TOWER,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
        },
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2-with-an-eye")
    source = read_source(embedded_path())
    source.fast.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(source.special_variables))
    (path / "chat_template.jinja").write_text(source.chat_template or "")
    (path / "config.json").write_text(json.dumps(config_values(source.tokens.index(IMAGE_TOKEN))))
    cut = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    (path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor", **cut}))
    save_file({**tower_weights(), **language_weights()}, path / "model.safetensors")
    return path


def text_messages(question: str) -> Messages:
    return [{"role": "user", "content": [{"type": "text", "text": question}]}]


def picture_requests(gateway: Gateway) -> list[Request]:
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is "}, {"type": "image"}, {"type": "text", "text": "?"}],
        }
    ]
    shown = [as_pil(picture(40 + index, 60, index)) for index in range(3)]
    return [request(100 + index, gateway.prompt(messages, [image]), STEPS) for index, image in enumerate(shown)]


def test_text_is_answered_as_by_the_language_model_alone(folder: Path) -> None:
    plain, seeing = Gateway(embedded_path()), Gateway(folder)
    questions = [request(index, plain.prompt(text_messages(text), []), STEPS) for index, text in enumerate(QUESTIONS)]
    for one, text in zip(questions, QUESTIONS, strict=True):
        assert seeing.prompt(text_messages(text), []).ids == one.prompt_ids
    expected = Engine(embedded_path(), CONFIG, activation_dtype="float32").run(questions)
    assert expected[0].token_ids[:7] == [504, 3575, 282, 4649, 314, 7042, 30]

    pictures, engine = picture_requests(seeing), Engine(folder, CONFIG)
    before = engine.run([questions[0]])
    beside = engine.run([questions[1], *pictures, questions[2]])
    after = engine.run([request(0, seeing.prompt(text_messages(QUESTIONS[0]), []), STEPS)])
    # what the prefix cache gave is no part of an answer
    for outcomes in (before, beside, after):
        for seq_id in outcomes.keys() & expected.keys():
            found, wanted = outcomes[seq_id], expected[seq_id]
            assert (found.token_ids, found.logprobs) == (wanted.token_ids, wanted.logprobs), QUESTIONS[seq_id]
    assert engine.num_jobs == 3
    assert len({tuple(beside[one.seq_id].token_ids) for one in pictures} | {tuple(before[0].token_ids)}) >= 2
