"""The image side of a checkpoint: tower, projector, and what a byte of a colour becomes. Called by `checkpoint.py`,
engine and worker processes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model_runtime.architecture import ModelConfig
from model_runtime.images import TowerKernels
from model_runtime.ops.registry import Ops
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.json_file import read_json_if_any
from model_runtime.weights.sides import ImageTensors
from model_runtime.weights.source import TensorSource
from vision.config import Preprocessor, read_preprocessor
from vision.encoder.model import ImageEncoder
from vision.encoder.parameters import is_matrix
from vision.encoder.readers import read_vision
from vision.preprocess.common import ImageShapeError
from vision.preprocess.kimi import Kimi
from vision.preprocess.qwen2_vl import MAX_ASPECT, Qwen2VL
from vision.preprocess.values import PreprocessorError
from vision.tower_config import VisionConfigError, VisionTowerConfig, VisionWeightsError
from vision.weights import load_vision, vision_table

Json = Mapping[str, object]

LARGE_SHAPES = ((4096, 4096), (3072, 4096), (4096, 3072), (1536, 8192), (8192, 1536), (768, 16384), (16384, 768))
"""Height and width of images of 12 to 16 megapixels, of which recipes make the most that they ever make."""

USUAL_SIDE = 224


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedVision:
    """What turns a processed image into embeddings."""

    encoder: ImageEncoder
    table_CV: Tensor
    """float32 [3, 256]: what each byte becomes in each channel."""
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSide:
    """A checkpoint's image side whose configuration is read and found to be supported, and whose weights are not."""

    tower: VisionTowerConfig
    table_CV: Tensor
    largest_image: int
    """Pixels that the tower gets for one image, at most."""
    usual_embeddings: int
    """Of an image of `USUAL_SIDE` pixels a side: what any image cache has to hold."""
    preprocessor: Preprocessor
    source: TensorSource

    @property
    def num_parameters(self) -> int:
        """Numbers in tower and projector."""
        return sum(math.prod(parameter.shape) * len(parameter.keys) for parameter in vision_table(self.tower))


def _preprocessor(folder: Path, config_json: Json) -> Preprocessor:
    processor = read_json_if_any(folder / "processor_config.json")
    return read_preprocessor(read_json_if_any(folder / "preprocessor_config.json"), processor, config_json)


def _largest_image(preprocessor: Preprocessor) -> int:
    """Pixels of the largest image that the recipe makes of `LARGE_SHAPES`, and no less than it makes of any other."""
    recipe, largest = preprocessor.recipe, 0
    if isinstance(recipe, Qwen2VL):
        # of the longest strips, one row of embeddings is left, however many that makes
        strip = recipe.patch * recipe.merge * math.isqrt(MAX_ASPECT * recipe.max_pixels)
        return max(recipe.min_pixels, recipe.max_pixels, strip)
    for height, width in LARGE_SHAPES:
        try:
            layout = recipe.layout(height, width)
        except ImageShapeError:
            continue
        largest = max(largest, layout.tiles * layout.height * layout.width)
    # Kimi counts whole patches and fills up with zeros: of strips it makes up to a quarter more
    return largest * 5 // 4 if isinstance(recipe, Kimi) else largest


def _usual_embeddings(preprocessor: Preprocessor) -> int:
    layout = preprocessor.recipe.layout(USUAL_SIDE, USUAL_SIDE)
    return sum(piece for piece in preprocessor.markup.pieces(layout) if isinstance(piece, int))


def read_image_side(folder: Path, config_json: Json, config: ModelConfig, source: TensorSource) -> ImageSide:
    """From the files of a checkpoint whose language model is `config`; `source` has the image tensors by `vision_key`.

    Raises CheckpointError for a tower, a projector or preprocessing that is not supported, naming the key.
    """
    try:
        tower = read_vision(config_json, config.hidden_size)
        preprocessor = _preprocessor(folder, config_json)
    except (VisionConfigError, PreprocessorError) as error:
        raise CheckpointError(f"the image side of the checkpoint: {error}") from None
    if preprocessor.image_token_id >= config.vocab_size:
        raise CheckpointError(
            f"config.json: the image token {preprocessor.image_token_id} exceeds the vocabulary of {config.vocab_size}"
        )
    assert len(tower.deepstack) == config.num_deepstack, "two readers of one config.json disagree"
    table_CV = torch.from_numpy(preprocessor.recipe.finish.table())
    return ImageSide(
        tower=tower,
        table_CV=table_CV,
        largest_image=_largest_image(preprocessor),
        usual_embeddings=_usual_embeddings(preprocessor),
        preprocessor=preprocessor,
        source=source,
    )


def _packed_bytes(name: str, tensor: Tensor) -> int:
    """Matrices keep their storage type, all else becomes float32."""
    return tensor.numel() * (tensor.element_size() if is_matrix(name, tensor) else torch.float32.itemsize)


def load_image_side(side: ImageSide, ops: Ops, device: torch.device, progress: Callable[[int], None]) -> LoadedVision:
    """Fill the tower and the projector; `progress` is told how many numbers each tensor has.

    Raises CheckpointError for a tensor that is missing, has another shape, or that nothing uses.
    """
    try:
        parameters = load_vision(side.tower, ImageTensors(side.source, device, progress))
    except VisionWeightsError as error:
        raise CheckpointError(str(error)) from None
    weight_bytes = sum(_packed_bytes(name, tensor) for name, tensor in parameters.items())
    encoder = ImageEncoder(side.tower, parameters, TowerKernels(ops))
    return LoadedVision(
        encoder=encoder,
        table_CV=side.table_CV,
        weight_bytes=weight_bytes,
    )
