"""Bit for bit: what an image becomes is the same alone, among others of other sizes, and with any number of threads.

The towers are given the compiled operations of the language model, as in the engine. Equality, not closeness.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_runtime.images import TowerKernels
from model_runtime.kernels.build import BuildError
from model_runtime.kernels.library import library
from model_runtime.ops import load_ops, set_threads
from tests.vision.towers import flat, make_encoder, make_model
from vision.encoder.model import ImageEncoder, ImageInput

WIDE: dict[str, object] = {
    "hidden_size": 80,
    "intermediate_size": 1200,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
}
"""Wide enough for torch's own products of matrices to depend on the number of rows and of threads."""
SQUARES = {**WIDE, "image_size": 56, "patch_size": 4}
CLIP = {"model_type": "clip_vision_model", **SQUARES}
SIGLIP = {"model_type": "siglip_vision_model", **SQUARES, "vision_use_head": False}
QWEN = {"depth": 3, "num_heads": 4, "patch_size": 4}
PIXTRAL = {"model_type": "pixtral", **WIDE, "num_attention_heads": 4, "image_size": 160, "patch_size": 4}
KIMI = {"patch_size": 4, "pos_emb_height": 6, "pos_emb_width": 6, **WIDE, "num_attention_heads": 4}
MODELS: dict[str, tuple[dict[str, object], str]] = {
    "llava": ({"model_type": "llava", "vision_config": CLIP}, "llama"),
    "gemma3": ({"model_type": "gemma3", "vision_config": SIGLIP, "mm_tokens_per_image": 49}, "gemma3_text"),
    "internvl": ({"model_type": "internvl", "vision_config": {"model_type": "internvl_vision", **SQUARES}}, "qwen2"),
    "idefics3": ({"model_type": "idefics3", "vision_config": SQUARES, "scale_factor": 2}, "llama"),
    "llava_onevision": (
        {
            "model_type": "llava_onevision",
            "vision_config": SIGLIP,
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
            "vision_aspect_ratio": "anyres_max_2",
        },
        "qwen2",
    ),
    "qwen2_vl": (
        {"model_type": "qwen2_vl", "vision_config": {**QWEN, "embed_dim": 80, "mlp_ratio": 15, "hidden_size": 24}},
        "qwen2_vl_text",
    ),
    "qwen2_5_vl": (
        {
            "model_type": "qwen2_5_vl",
            "vision_config": {
                **QWEN,
                "hidden_size": 80,
                "intermediate_size": 1200,
                "out_hidden_size": 24,
                "fullatt_block_indexes": [1],
                "window_size": 32,
            },
        },
        "qwen2_5_vl_text",
    ),
    "qwen3_vl": (
        {
            "model_type": "qwen3_vl",
            "vision_config": {
                **QWEN,
                "hidden_size": 80,
                "intermediate_size": 1200,
                "out_hidden_size": 24,
                "num_position_embeddings": 36,
                "deepstack_visual_indexes": [0, 2],
            },
        },
        "qwen3_vl_text",
    ),
    "pixtral": ({"model_type": "mistral3", "vision_config": PIXTRAL}, "mistral"),
    "kimi": ({"model_type": "kimi_k25", "vision_config": KIMI, "projection_hidden_size": 80}, "deepseek_v3"),
}
GRIDS = ((4, 6), (2, 2), (40, 28), (10, 4), (28, 28), (14, 14))
"""Rows and columns of patches of images for the packed towers."""
TILES = (((1, 2), (30, 61)), (None, (40, 40)), ((2, 2), (56, 50)), ((2, 1), (90, 33)))
"""Grid of tiles and size of images for LLaVA-OneVision."""


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def squares(name: str) -> list[ImageInput]:
    if name == "llava_onevision":
        counts = [1 if grid is None else 1 + grid[0] * grid[1] for grid, _ in TILES]
        return [
            ImageInput(pixels=draw(count, 3, 56, 56), tile_grid=grid, size=size)
            for count, (grid, size) in zip(counts, TILES, strict=True)
        ]
    return [ImageInput(pixels=draw(count, 3, 56, 56)) for count in (1, 7, 1, 2)]


def images(name: str) -> list[ImageInput]:
    if name == "pixtral":
        return [ImageInput(pixels=draw(1, 3, 4 * rows, 4 * columns)) for rows, columns in GRIDS]
    if name == "kimi":
        return [ImageInput(pixels=draw(rows * columns, 48), grid=(rows, columns)) for rows, columns in GRIDS]
    if name.startswith("qwen"):
        return [ImageInput(pixels=draw(rows * columns, 96), grid=(rows, columns)) for rows, columns in GRIDS]
    return squares(name)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads for the rest of the test."""
    before = torch.get_num_threads()
    yield set_threads
    set_threads(before)


def compiled_encoder(name: str, folder: Path) -> ImageEncoder:
    try:
        library()
    except BuildError as error:
        pytest.skip(str(error))
    values, text = MODELS[name]
    return make_encoder(make_model(values, text), folder, TowerKernels(load_ops(torch.device("cpu"), "auto")))


def encoded(encoder: ImageEncoder, batch: Sequence[ImageInput]) -> list[list[Tensor]]:
    return [flat(features) for features in encoder.encode(batch)]


def same(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    pairs = [pair for left, right in zip(one, other, strict=True) for pair in zip(left, right, strict=True)]
    return all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_an_image_is_the_same_in_every_company(name: str, tmp_path: Path, threads: Callable[[int], None]) -> None:
    encoder, batch = compiled_encoder(name, tmp_path), images(name)
    threads(2)
    alone = [encoded(encoder, [image])[0] for image in batch]
    assert all(tensor.isfinite().all() and tensor.std() > 0.05 for features in alone for tensor in features)
    for count in (1, 3):
        threads(count)
        assert same([encoded(encoder, [image])[0] for image in batch], alone), f"alone, {count} threads"
        assert same(encoded(encoder, batch), alone), f"together, {count} threads"
        assert same(encoded(encoder, batch[::-1]), alone[::-1]), f"the other way round, {count} threads"
        assert same(encoded(encoder, batch[1:3]), alone[1:3]), f"two of them, {count} threads"
