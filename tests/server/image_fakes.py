"""Prepared images of any size without pixels worth mentioning, and models of several families that are all prompt."""

import asyncio
from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import cast

from fastapi import FastAPI

from scheduler.plan import ImagePixels
from server.app import create_app
from server.errors import BadRequest
from server.gateway_config import GatewayConfig
from server.images import ImagePipeline, PreparedImage
from server.prompt.build import PromptBuilder
from server.prompt.images import ChatPrompt
from server.prompt.options import ChatOptions
from server.prompt.tokenizer import Tokenizer
from tests import vlm_templates as templates
from tests.server.fakes import MODEL, TEMPLATE, FakeEngine, LocalChecker, make_tokenizer
from vision.config import Preprocessor
from vision.placeholders import Markup, NamedTiles, Patches, PatchRows, Tiles
from vision.preprocess import clip
from vision.preprocess.common import Layout
from vision.preprocess.values import Values

RECIPE = clip.read_llava(Values({}))
LENGTH = 4096
ROWS = tuple(f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2))


def prepared(height: int, width: int, *, rows: int = 0, cols: int = 0, name: str = "") -> PreparedImage:
    """One tile, or rows x cols of them and a whole view. Its key tells size and name."""
    tiles = rows * cols + 1
    layout = Layout(
        image_height=height, image_width=width, height=height, width=width, tiles=tiles, rows=rows, cols=cols
    )
    pixels = ImagePixels(
        data=bytes(tiles * height * width * 3),
        tiles=tiles,
        height=height,
        width=width,
        rows=rows,
        cols=cols,
        image_height=height,
        image_width=width,
    )
    return PreparedImage(sha256(f"{layout} {name}".encode()).digest(), layout, pixels)


def family(
    template: str, markup: Markup, specials: Sequence[str], *, placeholder: str = "", around: tuple[str, str] = ("", "")
) -> tuple[Tokenizer, Preprocessor]:
    """The first of `specials` is the image token, and the placeholder unless another is named."""
    tokenizer = make_tokenizer(*specials, template=template)
    image, place = tokenizer.id_of(specials[0]), tokenizer.id_of(placeholder or specials[0])
    assert image is not None
    assert place is not None
    return tokenizer, Preprocessor(
        recipe=RECIPE,
        markup=markup,
        image_token_id=image,
        placeholder_id=place,
        around=around,
        has_mrope=isinstance(markup, Patches),
    )


FAMILIES = {
    "llava": family(templates.LLAVA, Tiles(per_tile=3), ["<image>"]),
    "idefics3": family(
        templates.IDEFICS3,
        NamedTiles(per_tile=2),
        ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *ROWS],
    ),
    "internvl": family(
        templates.INTERNVL, Tiles(per_tile=3, start="<img>", end="</img>"), ["<IMG_CONTEXT>", "<img>", "</img>"]
    ),
    "gemma3": family(
        templates.GEMMA3,
        Tiles(per_tile=3, start="<start_of_image>", end="<end_of_image>"),
        ["<image_soft_token>", "<start_of_image>", "<end_of_image>", "<start_of_turn>", "<end_of_turn>"],
        placeholder="<start_of_image>",
        around=("\n\n", "\n\n"),
    ),
    "qwen2_vl": family(templates.QWEN, Patches(unit=28), ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"]),
    "pixtral": family(
        templates.PIXTRAL, PatchRows(unit=16), ["[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]", "[/INST]"]
    ),
    "strings": family(TEMPLATE, Tiles(per_tile=3), ["<image>"]),
}
"""By name: (tokenizer with the family's template, preprocessor with its markup)."""


def build(
    name: str,
    messages: list[dict[str, object]],
    images: Sequence[PreparedImage] = (),
    *,
    length: int = LENGTH,
    keep_last: int | None = None,
) -> ChatPrompt:
    """The prompt of a family."""
    tokenizer, preprocessor = FAMILIES[name]
    builder = PromptBuilder(tokenizer, preprocessor)
    return asyncio.run(builder.chat(messages, images, max_model_len=length, options=ChatOptions(keep_last=keep_last)))


def ids_of(name: str, text: str) -> "array[int]":
    """The ids of a prompt that was written by hand."""
    return FAMILIES[name][0].encode(text, add_special_tokens=False, allow_special=True)


def image_part(url: str = "data:28x56") -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


class FakePipeline:
    """Makes an image of the size that a URL such as data:28x56 names, and of the name after it; refuses others."""

    def __init__(self, preprocessor: Preprocessor) -> None:
        self.preprocessor = preprocessor
        self.calls: list[tuple[list[str], bytes]] = []
        self.hold: asyncio.Event | None = None

    async def prepare(self, urls: Sequence[str], salt: bytes) -> tuple[PreparedImage, ...]:
        self.calls.append((list(urls), salt))
        if self.hold is not None:
            await self.hold.wait()
        return tuple(self._one(url, number) for number, url in enumerate(urls, start=1))

    def _one(self, url: str, number: int) -> PreparedImage:
        size, _, name = url.removeprefix("data:").partition(",")
        height, _, width = size.partition("x")
        if not width.isdecimal():
            raise BadRequest(f"image {number}: no size", param="messages", code="corrupt_image")
        return prepared(int(height), int(width), name=name)


def image_app(engine: FakeEngine, name: str = "qwen2_vl", **options: object) -> tuple[FastAPI, FakePipeline]:
    """An app of a model that takes images."""
    tokenizer, preprocessor = FAMILIES[name]
    pipeline = FakePipeline(preprocessor)
    config = GatewayConfig(**options)  # type: ignore[arg-type]
    return create_app(config, engine, tokenizer, MODEL, LocalChecker(), cast(ImagePipeline, pipeline)), pipeline
