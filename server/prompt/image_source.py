"""What a checkpoint says about images: its preprocessor, and a tokenizer that keeps image tokens for the template.

Called once while the API process starts (`server/api_process.py`); no torch.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.json_file import read_json_if_any
from server.prompt.source import read_source
from server.prompt.tokenizer import Tokenizer
from vision.config import FAMILIES, TEXT_ONLY, Preprocessor, read_preprocessor
from vision.preprocess.values import PreprocessorError

logger = logging.getLogger(__name__)

_TOKEN_KEY = re.compile(r"(?:image|video|vision_start|vision_end|boi|eoi|media_placeholder)_token_(?:id|index)")
_LARGE_SIDE = 2048
"""Pixels of an image whose markup names every tile that there can be."""


def read_images(path: Path) -> Preprocessor | None:
    """The recipe and the tokens for images of a checkpoint, or of an image side apart; None for a model that takes
    none. Raises CheckpointError for a model of images whose files are wrong or not supported."""
    config = read_json_if_any(path / "config.json") if path.is_dir() else {}
    name = config.get("model_type")
    if name in TEXT_ONLY:
        logger.warning("images are not supported for model_type %r: it is served as a model of text", name)
        return None
    if not config.get("vision_config") and name not in FAMILIES:
        return None
    processor = read_json_if_any(path / "processor_config.json")
    try:
        return read_preprocessor(read_json_if_any(path / "preprocessor_config.json"), processor, config)
    except PreprocessorError as error:
        raise CheckpointError(str(error)) from None


def load_tokenizer_for(
    model_path: Path, preprocessor: Preprocessor | None, image_folder: Path | None = None
) -> Tokenizer:
    """The model's tokenizer, with each token that has to do with images made a special one, so that no user's text
    becomes it. `image_folder` has the image side, if `model_path` has not. Raises CheckpointError."""
    source = read_source(model_path)
    if preprocessor is not None:
        names = list(
            _image_tokens(source.fast, preprocessor, read_json_if_any((image_folder or model_path) / "config.json"))
        )
        source.fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return Tokenizer(source)


def _image_tokens(fast: tokenizers.Tokenizer, preprocessor: Preprocessor, config: dict[str, object]) -> Iterator[str]:
    """Tokens that the vocabulary has and does not flag as special."""
    flagged = {token.content: token.special for token in fast.get_added_tokens_decoder().values()}
    for token_id in (preprocessor.placeholder_id, preprocessor.image_token_id):
        if fast.id_to_token(token_id) is None:
            raise CheckpointError(f"config.json names token {token_id} for images, which the tokenizer does not have")
    ids = {preprocessor.placeholder_id, preprocessor.image_token_id}
    ids |= {value for key, value in config.items() if _TOKEN_KEY.fullmatch(key) and isinstance(value, int)}
    for count in (1, 2):
        variant = preprocessor.for_images(count)
        pieces = variant.markup.pieces(variant.recipe.layout(_LARGE_SIDE, _LARGE_SIDE))
        for text in {piece for piece in pieces if isinstance(piece, str)}:
            found = fast.encode(text, add_special_tokens=False).ids
            ids |= {token_id for token_id in found if fast.id_to_token(token_id) in flagged}
            ids |= {token_id for token_id in (fast.token_to_id(text),) if token_id is not None}
    for token_id in sorted(ids):
        name = fast.id_to_token(token_id)
        if name is not None and not flagged.get(name, False):
            yield name
