"""Which file or folder a MODEL argument means. Supervisor, API and engine processes; does not import torch."""

from dataclasses import dataclass
from pathlib import Path

from server.config import EMBEDDED
from server.embedded import MODEL_NAME, embedded_path


class ModelNotFound(Exception):
    """MODEL names nothing that can be served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """Where the checkpoint is and what it is called unless --served-model-name says otherwise."""

    path: Path
    name: str


def resolve_model(model: str) -> ResolvedModel:
    """Raises ModelNotFound or EmbeddedModelMissing with a message that says what to do."""
    if model == EMBEDDED:
        return ResolvedModel(path=embedded_path(), name=MODEL_NAME)
    path = Path(model).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        return ResolvedModel(path=path, name=path.resolve().name)
    if path.is_file() and path.suffix == ".gguf":
        return ResolvedModel(path=path, name=path.stem)
    if path.is_dir():
        raise ModelNotFound(f"{model} is a folder without a config.json: not a Hugging Face checkpoint")
    raise ModelNotFound(
        f"{model} is neither a folder with a Hugging Face checkpoint, nor a .gguf file, nor '{EMBEDDED}'; "
        "firstlight downloads nothing from model hubs"
    )
