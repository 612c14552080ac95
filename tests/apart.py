"""A checkpoint of `tests/vlm.py` as two folders: its language model as a checkpoint of text, and its image side."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from model_runtime.weights.sides import language_key
from vision.weights import vision_key

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def write_apart(whole: Path, text: Path, images: Path) -> None:
    """What `--mmproj` joins again."""
    for folder in (text, images):
        folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((whole / "config.json").read_text())
    own = {"eos_token_id": config["text_config"].get("eos_token_id"), "tie_word_embeddings": False}
    (text / "config.json").write_text(json.dumps({**config["text_config"], **own}))
    (images / "config.json").write_text(json.dumps(config))
    for name in TEXT_FILES:
        if (whole / name).is_file():
            shutil.copy(whole / name, text / name)
    for file in whole.glob("*processor_config.json"):
        shutil.copy(file, images / file.name)
    tensors = load_file(whole / "model.safetensors")
    seen = {key: tensor for key, tensor in tensors.items() if vision_key(key) is not None}
    save_file(seen, images / "model.safetensors", {"format": "pt"})
    said = {language_key(key): tensor for key, tensor in tensors.items() if key not in seen}
    save_file(said, text / "model.safetensors", {"format": "pt"})
