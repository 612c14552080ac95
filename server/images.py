"""From the image URLs of a request to bytes for the tower: fetched, decoded, cut and resized off the event loop.

Owns the worker threads for images, the cache of their results, and the bounds on both. Called by `server/api/chat.py`
in the API process; one pipeline lives as long as the server, and is used from its event loop only.

Memory: each request has at most `IMAGES_AT_ONCE` files unpacked, `max_media_fetches` of all are fetched, and the pixels
of what is being decoded are counted, whichever request they belong to. A cancelled request takes its waiting work with
it, unless another request wants the same image.
"""

import asyncio
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from scheduler.plan import ImagePixels
from server.errors import from_image, too_many_images
from server.single_flight import SingleFlight
from vision.config import Preprocessor
from vision.errors import ImageError
from vision.image import decode
from vision.limits import ImageLimits
from vision.preprocess.common import Layout, Recipe
from vision.source import Fetcher, decode_data_url, is_data_url

IMAGES_AT_ONCE = 4
"""Images of one request that are worked on at the same time: enough for the cores, and one album does not stand in
everybody's way."""

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One image, ready for the prompt (`layout`) and for the engine (`pixels`). Shared between requests: read-only."""

    key: bytes
    """32 bytes, of the preprocessing, the image file and the cache salt: equal keys are equal pixels. Two files with
    equal pixels have different keys, which costs an encoding and never a wrong answer."""
    layout: Layout
    pixels: ImagePixels


class ImagePipeline:
    """Prepares the images of requests. Close it with `aclose()`."""

    def __init__(self, preprocessor: Preprocessor, limits: ImageLimits, *, fetcher: Fetcher | None = None) -> None:
        self.preprocessor = preprocessor
        self._limits = limits
        self._variants = [
            (variant.recipe, bytes.fromhex(variant.fingerprint()))
            for variant in (preprocessor, preprocessor.for_images(2))
        ]
        self._fetcher = fetcher or Fetcher(limits)
        self._fetches = asyncio.Semaphore(limits.max_media_fetches)
        self._pool = ThreadPoolExecutor(_usable_cores(), thread_name_prefix="image")
        self._room = PixelRoom(limits.max_decoding_pixels)
        self._flights: SingleFlight[PreparedImage] = SingleFlight()
        self._cache = _Cache(limits.image_cache_bytes)

    async def aclose(self) -> None:
        """Ends the work in progress; what a thread has begun it finishes, for nobody."""
        await self._flights.aclose()
        self._pool.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.aclose()

    async def prepare(self, urls: Sequence[str], salt: bytes) -> tuple[PreparedImage, ...]:
        """The images of one request, in order. Requests with different salts share nothing, not even time.

        Raises ApiError: for more images than the limit, or for the first image that cannot be used.
        """
        if len(urls) > self._limits.limit_mm_per_prompt:
            raise too_many_images(len(urls), self._limits.limit_mm_per_prompt)
        recipe, fingerprint = self._variants[len(urls) > 1]
        places = asyncio.Semaphore(IMAGES_AT_ONCE)
        tasks = [asyncio.create_task(self._one(url, recipe, fingerprint, salt, places)) for url in urls]
        images = []
        try:
            for task in tasks:
                images.append(await task)
        except ImageError as error:
            raise from_image(error, len(images) + 1) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return tuple(images)

    async def _one(
        self, url: str, recipe: Recipe, fingerprint: bytes, salt: bytes, places: asyncio.Semaphore
    ) -> PreparedImage:
        async with places:
            if is_data_url(url):
                data, digest = await self._in_pool(lambda: _hashed(decode_data_url(url, self._limits)))
                return await self._prepared(data, recipe, _key(fingerprint, digest, salt))
            return await self._flights.run(
                (url, fingerprint, salt), lambda: self._fetched(url, recipe, fingerprint, salt)
            )

    async def _fetched(self, url: str, recipe: Recipe, fingerprint: bytes, salt: bytes) -> PreparedImage:
        async with self._fetches:
            body = await self._fetcher.fetch(url)
            data, digest = await self._in_pool(lambda: _hashed(body))
            return await self._prepared(data, recipe, _key(fingerprint, digest, salt))

    async def _prepared(self, data: bytes, recipe: Recipe, key: bytes) -> PreparedImage:
        found = self._cache.get(key)
        return found or await self._flights.run(key, lambda: self._decoded(data, recipe, key))

    async def _decoded(self, data: bytes, recipe: Recipe, key: bytes) -> PreparedImage:
        outcome = await self._in_pool(lambda: _process(data, recipe, key, self._limits, self._room))
        if isinstance(outcome, ImageError):
            raise outcome
        self._cache.put(outcome)
        return outcome

    async def _in_pool(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _hashed(data: bytes) -> tuple[bytes, bytes]:
    return data, hashlib.sha256(data).digest()


def _key(fingerprint: bytes, digest: bytes, salt: bytes) -> bytes:
    return hashlib.sha256(fingerprint + digest + salt).digest()


def _process(
    data: bytes, recipe: Recipe, key: bytes, limits: ImageLimits, room: "PixelRoom"
) -> PreparedImage | ImageError:
    """Worker thread. An error is returned, not raised, without its traceback: that would keep the pixels in memory for
    as long as anybody has the error."""
    taken = []

    def admit(pixels: int) -> None:
        room.take(pixels)
        taken.append(pixels)

    try:
        return _cut(data, recipe, key, limits, admit)
    except ImageError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    finally:
        room.give_back(sum(taken))


def _cut(data: bytes, recipe: Recipe, key: bytes, limits: ImageLimits, admit: Callable[[int], None]) -> PreparedImage:
    image = decode(data, limits, admit)
    layout = recipe.layout(image.height, image.width)
    tiles_NHWC = recipe.tiles(image)
    pixels = ImagePixels(
        data=tiles_NHWC.data.toreadonly().cast("B"),
        tiles=layout.tiles,
        height=layout.height,
        width=layout.width,
        rows=layout.rows,
        cols=layout.cols,
        image_height=layout.image_height,
        image_width=layout.image_width,
    )
    return PreparedImage(key, layout, pixels)


class PixelRoom:
    """Counts the pixels that are being decoded in all threads, which wait here for one another, in order."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._changed, self._turn = threading.Condition(), threading.Lock()

    def take(self, pixels: int) -> None:
        """Waits until they fit; what is more than the limit has to be alone. A large image is not overtaken."""
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + pixels <= self._limit)
            self._used += pixels

    def give_back(self, pixels: int) -> None:
        """When they are gone from memory."""
        with self._changed:
            self._used -= pixels
            self._changed.notify_all()


class _Cache:
    """The results that were wanted last, up to a number of bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._images: OrderedDict[bytes, PreparedImage] = OrderedDict()

    def get(self, key: bytes) -> PreparedImage | None:
        """None where it is not there."""
        if key in self._images:
            self._images.move_to_end(key)
        return self._images.get(key)

    def put(self, image: PreparedImage) -> None:
        """Makes room by dropping others; what is larger than the cache is not kept."""
        size = len(image.pixels.data)
        if size > self._limit or image.key in self._images:
            return
        self._images[image.key] = image
        self._used += size
        while self._used > self._limit:
            _, dropped = self._images.popitem(last=False)
            self._used -= len(dropped.pixels.data)
