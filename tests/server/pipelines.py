"""Image pipelines of small models, pictures for them as clients send them, and a count of what is decoded."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import TypeVar

import pytest
from PIL import Image

import server.images
from server.errors import ApiError
from server.images import ImagePipeline
from tests.vision.pictures import data_url, noise, save
from vision.config import Preprocessor, read_preprocessor
from vision.image import decode
from vision.limits import ImageLimits

T = TypeVar("T")
LIMITS = ImageLimits()
PINPOINTS = [[28, 56], [56, 28], [56, 56]]
LLAVA = {"model_type": "llava", "image_token_id": 1, "vision_config": {"image_size": 28, "patch_size": 14}}
ONEVISION = {
    **LLAVA,
    "model_type": "llava_onevision",
    "image_grid_pinpoints": PINPOINTS,
    "vision_config": {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
}


def run(work: Coroutine[None, None, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))


def llava() -> Preprocessor:
    return read_preprocessor({"size": 28, "crop_size": 28}, None, LLAVA)


def onevision() -> Preprocessor:
    file = {"size": {"height": 28, "width": 28}, "image_grid_pinpoints": PINPOINTS}
    return read_preprocessor(file, None, ONEVISION)


def picture_url(seed: int, height: int = 40, width: int = 60) -> str:
    return data_url(save(Image.fromarray(noise(height, width, seed=seed)), "PNG"))


A, B = picture_url(1), picture_url(2)


class Counter:
    """Counts the files that are decoded, as the pipeline sees `decode`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.gate = threading.Event()
        self.gate.set()
        monkeypatch.setattr(server.images, "decode", self)

    def __call__(self, data: bytes, limits: ImageLimits, admit: object) -> Image.Image:
        self.calls += 1
        assert self.gate.wait(20)
        return decode(data, limits, admit)  # type: ignore[arg-type]


async def prepared(
    *urls: str, salt: bytes = b"", preprocessor: Preprocessor | None = None
) -> tuple[server.images.PreparedImage, ...]:
    pipeline = ImagePipeline(preprocessor or llava(), LIMITS)
    try:
        return await pipeline.prepare(urls, salt)
    finally:
        await pipeline.aclose()


async def failure(pipeline: ImagePipeline, *urls: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await pipeline.prepare(urls, b"")
    return caught.value
