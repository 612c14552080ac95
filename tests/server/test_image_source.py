"""What a checkpoint's files say about images, and that its image tokens are the template's alone."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from model_runtime.weights.errors import CheckpointError
from server.prompt.image_source import load_tokenizer_for, read_images
from server.prompt.tokenizer import Tokenizer
from tests import vlm_templates
from tests.server.tiny_tokenizers import CHATML_SPECIALS, chatml_folder, save_folder, trained_bpe
from vision.config import TEXT_ONLY
from vision.placeholders import NamedTiles, Tiles

TOWER = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
FIRST = trained_bpe(CHATML_SPECIALS).get_vocab_size()
"""Id of the first token that `folder_with` adds."""
PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
}
IDEFICS = {
    "model_type": "idefics3",
    "scale_factor": 2,
    "vision_config": {"image_size": 28, "patch_size": 7},
}
IDEFICS_PROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": 56},
    "max_image_size": {"longest_edge": 28},
}


def folder_with(folder: Path, tokens: list[str], model: dict[str, object], processor: dict[str, object]) -> Path:
    """A checkpoint without weights, whose tokenizer does not flag `tokens` as special."""
    fast = trained_bpe(CHATML_SPECIALS)
    fast.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    save_folder(folder, fast, {"chat_template": vlm_templates.LLAVA, "eos_token": "<|im_end|>"})
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def llava(folder: Path, **changes: object) -> Path:
    model = {"model_type": "llava", "image_token_index": FIRST, "vision_config": TOWER}
    return folder_with(folder, ["<image>"], model | changes, PROCESSOR)


def loaded(folder: Path) -> Tokenizer:
    return load_tokenizer_for(folder, read_images(folder))


def test_a_token_that_the_tokenizer_does_not_flag(tmp_path: Path) -> None:
    folder = llava(tmp_path)
    preprocessor = read_images(folder)
    assert preprocessor is not None
    assert (preprocessor.placeholder_id, preprocessor.markup) == (FIRST, Tiles(per_tile=4))
    assert not load_tokenizer_for(folder, None).is_special(FIRST)
    tokenizer = loaded(folder)
    assert tokenizer.is_special(FIRST)
    assert FIRST not in tokenizer.encode("an <image>", add_special_tokens=False, allow_special=False)
    assert tokenizer.encode("an <image>", add_special_tokens=False, allow_special=True)[-1] == FIRST


def test_every_piece_of_a_markup(tmp_path: Path) -> None:
    """Tiles that are named one by one, and tokens that only config.json names."""
    rows = [f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2)]
    names = ["<fake_token_around_image>", "<global-img>", *rows]
    tokens = ["<image>", *names, "<tool>", "<begin>"]
    model = IDEFICS | {"image_token_id": FIRST, "vision_start_token_id": FIRST + 8}
    folder = folder_with(tmp_path, tokens, model, IDEFICS_PROCESSOR)
    preprocessor = read_images(folder)
    assert preprocessor is not None
    assert preprocessor.markup == NamedTiles(per_tile=4)
    tokenizer = loaded(folder)
    assert {tokenizer.token_text(id) for id in tokenizer.special_ids if id >= FIRST} == {*tokens} - {"<tool>"}


def test_models_without_images(tmp_path: Path) -> None:
    assert read_images(tmp_path / "model.gguf") is None
    folder = chatml_folder(tmp_path)
    assert read_images(folder) is None
    for model in ({"model_type": "llama"}, {"model_type": "llama", "vision_config": None}):
        (folder / "config.json").write_text(json.dumps(model))
        assert read_images(folder) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image_token_index": 100_000}, "token 100000 for images"),
        ({"image_token_index": -1}, "image_token_index must be a token id"),
        ({"model_type": "blip"}, "images for model_type 'blip' are not supported"),
        ({"vision_config": TOWER | {"image_size": 56}}, "tiles are 28 x 28 pixels, but the tower takes 56 x 56"),
    ],
)
def test_what_ends_the_start(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    folder = llava(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=words):
        loaded(folder)


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    folder = llava(tmp_path)
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        read_images(folder)


@pytest.mark.parametrize("name", sorted(TEXT_ONLY))
def test_a_model_whose_images_are_not_supported_is_one_of_text(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name, "vision_config": {"patch_size": 14}}))
    assert read_images(tmp_path) is None
