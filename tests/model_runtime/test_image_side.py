"""Both sides of a vision-language checkpoint load, whatever their keys are called; what does not fit is refused by
name."""

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_runtime.checkpoint import LoadedModel, load_model
from model_runtime.ops import load_ops
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.sides import language_key
from tests.checkpoints import make_checkpoint
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.vlm import make_vlm
from vision.encoder.inputs import image_input

OPS = load_ops(DEVICE, "reference")
PROMPT = list(range(3, 40))
WEIGHTS = "model.safetensors"


def load(folder: Path) -> LoadedModel:
    return load_model(folder, OPS, DEVICE, lambda fraction: None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint for each of a few names."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("llava-clip", "llava-siglip", "idefics3", "mistral3", "qwen2_vl", "qwen3_vl", "gemma3"):
        make_vlm(folder / name, name)
    return folder


@pytest.fixture
def llava(made: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(made / "llava-clip", tmp_path / "llava"))


def edit_json(folder: Path, name: str, change: Mapping[str, object]) -> None:
    """Set keys of a JSON file, or remove those whose new value is None."""
    values = json.loads((folder / name).read_text()) | change
    (folder / name).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def edit_tensors(folder: Path, change: Mapping[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors."""
    tensors = load_file(folder / WEIGHTS) | change
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)


def logits(model: LoadedModel) -> Tensor:
    return PagedRun(model.decoder).step({0: PROMPT})[0]


def results(model: LoadedModel) -> tuple[Tensor, ...]:
    """Logits of a prompt without images, and what the tower makes of a picture."""
    assert model.vision is not None
    pixels = torch.randint(256, (1, 28, 28, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    if model.config.rope.mrope_sections:
        pixels = pixels[:, :16, :24].contiguous()
    encoder = model.vision.encoder
    image = image_input(encoder.config, model.vision.table_CV, pixels, rows=0, cols=0, image_height=28, image_width=28)
    (features,) = encoder.encode([image])
    return logits(model), features.embeddings_NO, *features.deepstack_NO


SPELLINGS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "llava, 2023": ("llava-clip", (("vision_tower.", "vision_tower.vision_model."),)),
    "llava, 2025": (
        "llava-clip",
        (
            ("language_model.lm_head.", "lm_head."),
            ("language_model.model.", "model.language_model."),
            ("vision_tower.", "model.vision_tower."),
            ("multi_modal_projector.", "model.multi_modal_projector."),
        ),
    ),
    "qwen2_vl, 2025": ("qwen2_vl", (("model.", "model.language_model."), ("visual.", "model.visual."))),
    "qwen3_vl, bare": ("qwen3_vl", (("model.language_model.", "model."), ("model.visual.", "visual."))),
    "idefics3, bare": ("idefics3", (("model.text_model.", "model."), ("model.vision_model.", "vision_model."))),
}
"""Which checkpoint, and what its keys begin with as it is and in another publisher's or version's files."""


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_keys_give_the_same_bits(made: Path, tmp_path: Path, name: str) -> None:
    case, renames = SPELLINGS[name]
    copy = Path(shutil.copytree(made / case, tmp_path / "copy"))
    tensors = {}
    for key, tensor in load_file(copy / WEIGHTS).items():
        begin, other = next(((begin, other) for begin, other in renames if key.startswith(begin)), ("", ""))
        tensors[other + key.removeprefix(begin)] = tensor
    assert tensors.keys() != load_file(copy / WEIGHTS).keys()
    save_file(tensors, copy / WEIGHTS)
    for ours, expected in zip(results(load(copy)), results(load(made / case)), strict=True):
        assert expected.abs().max() > 0.05
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("key", "plain"),
    [
        ("language_model.model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("language_model.model.blocks.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.text_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
    ],
)
def test_language_keys(key: str, plain: str) -> None:
    assert language_key(key) == plain


def test_every_number_is_counted_and_told(made: Path) -> None:
    """Qwen2-VL's tower uses all of its tensors; progress is told after each one of both sides."""
    seen: list[float] = []
    model = load_model(made / "qwen2_vl", OPS, DEVICE, seen.append)
    tensors = load_file(made / "qwen2_vl" / WEIGHTS)
    assert model.weight_bytes == sum(4 * tensor.numel() for tensor in tensors.values())
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    visual = sum(tensor.numel() for key, tensor in tensors.items() if key.startswith("visual."))
    language = 1 - visual / sum(tensor.numel() for tensor in tensors.values())
    assert any(math.isclose(share, language) for share in seen)
    assert len(seen) > len(tensors) / 2
    assert model.description.startswith("qwen2_vl (qwen2_vl_text), 0.2 M parameters")


def test_matrices_keep_the_storage_type(made: Path, tmp_path: Path) -> None:
    """Half the memory, and the same bits as from a file with the same numbers in float32."""
    tensors = {key: tensor.bfloat16() for key, tensor in load_file(made / "qwen2_vl" / WEIGHTS).items()}
    models = {}
    for dtype in (torch.bfloat16, torch.float32):
        copy = Path(shutil.copytree(made / "qwen2_vl", tmp_path / str(dtype)))
        save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, copy / WEIGHTS)
        models[dtype] = load(copy)
    for narrow, wide in zip(results(models[torch.bfloat16]), results(models[torch.float32]), strict=True):
        assert torch.equal(narrow, wide)
    expected = sum(tensor.numel() * (2 if tensor.dim() > 1 else 4) for tensor in tensors.values())
    assert models[torch.bfloat16].weight_bytes == expected


def test_a_byte_becomes_what_the_processor_says(made: Path) -> None:
    """From preprocessor_config.json (CLIP's colours), and from an image_processor in processor_config.json (0.5)."""
    clip, siglip = load(made / "llava-clip").vision, load(made / "llava-siglip").vision
    assert clip is not None and siglip is not None
    assert clip.table_CV.shape == (3, 256)
    assert clip.table_CV.dtype == torch.float32
    assert clip.table_CV[:, 51].tolist() == pytest.approx(
        [
            (0.2 - mean) / std
            for mean, std in ((0.48145466, 0.26862954), (0.4578275, 0.26130258), (0.40821073, 0.27577711))
        ]
    )
    assert siglip.table_CV[:, 51].tolist() == pytest.approx([-0.6] * 3)
    assert (made / "llava-siglip" / "processor_config.json").is_file()


def test_a_head_of_its_own_is_used_where_nothing_says_tied(made: Path, tmp_path: Path) -> None:
    """Published files of Mistral 3 and InternVL leave tie_word_embeddings out, which transformers reads as true."""
    copy = Path(shutil.copytree(made / "mistral3", tmp_path / "copy"))
    edit_json(copy, "config.json", {"tie_word_embeddings": None})
    assert torch.equal(logits(load(copy)), logits(load(made / "mistral3")))
    edit_tensors(copy, {"language_model.lm_head.weight": None})
    decoder = load(copy).decoder
    assert decoder.head is decoder.embedding


def test_a_model_of_text_alone_has_no_image_side(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", {})
    assert load(tmp_path).vision is None


PATCH = "vision_tower.embeddings.patch_embedding.weight"
MLP = "vision_tower.encoder.layers.0.mlp.fc1.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({PATCH: None}, f"lacks the image tensor {PATCH} (1 such)"),
        ({PATCH: torch.ones(32, 3, 7, 8)}, f"image tensor {PATCH} has shape (32, 3, 7, 8), the config asks for"),
        ({"vision_tower.extra.weight": torch.ones(2)}, "image tensor vision_tower.extra.weight is not used by llava"),
        ({MLP: torch.full((48, 32), torch.nan)}, f"NaN or infinite weights in {MLP}"),
        (
            {MLP: torch.ones(48, 32, dtype=torch.int8)},
            f"{MLP} is stored as int8; float32, float16, bfloat16 are supported",
        ),
        ({"model.vision_tower.pre_layrnorm.bias": torch.ones(32)}, "holds vision_tower.pre_layrnorm.bias twice"),
        ({"language_model.model.norm.weight": None}, "missing are model.norm.weight"),
        ({"language_model.model.extra": torch.ones(2)}, "unused are model.extra"),
        ({"audio_tower.weight": torch.ones(2)}, "unused are audio_tower.weight"),
    ],
)
def test_faults_name_the_key(llava: Path, change: dict[str, Tensor | None], words: str) -> None:
    edit_tensors(llava, change)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load(llava)


@pytest.mark.parametrize("key", ["vision_tower.rotary_emb.inv_freq", "vision_tower.embeddings.position_ids"])
def test_known_leftovers_are_ignored(llava: Path, key: str) -> None:
    expected = results(load(llava))
    edit_tensors(llava, {key: torch.arange(16)})
    assert all(map(torch.equal, results(load(llava)), expected))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "config.json",
            {"vision_config": {"model_type": "clip_vision_model", "hidden_act": "relu"}},
            "hidden_act must",
        ),
        ("config.json", {"vision_config": {"model_type": "dinov3"}}, "model_type must be clip_vision_model or siglip"),
        ("config.json", {"image_token_index": 5000}, "the image token 5000 exceeds the vocabulary of 261"),
        ("config.json", {"image_token_index": None}, "the model's configuration lacks image_token_id"),
        ("preprocessor_config.json", {"image_processor_type": "BlipImageProcessor"}, "'BlipImageProcessor' is not"),
        ("preprocessor_config.json", {"do_normalize": False}, "do_normalize must be true"),
    ],
)
def test_an_image_side_that_is_not_supported_is_refused_before_weights_are_read(
    llava: Path, name: str, change: dict[str, object], words: str
) -> None:
    edit_json(llava, name, change)
    (llava / WEIGHTS).unlink()
    save_file({"nothing": torch.ones(1)}, llava / WEIGHTS)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load(llava)
