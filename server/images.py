"""From the image URLs of a request to bytes for the tower: fetched, decoded, cut and resized off the event loop.

Owns the worker threads for images, the cache of their results, and the bounds on both. Called by
`server/api/conversation.py` in the API process; one pipeline lives as long as the server, and is used from its event
loop only.

Memory: a thread unpacks one file at a time, at most `max_media_fetches` fetched files wait for one, and the pixels of
what is being decoded are counted, whichever request they belong to; so are the results of requests that still wait for
others. A cancelled request takes its waiting work with it, unless another request wants the same image.
"""

import asyncio
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakValueDictionary

from model_runtime.host import usable_cores
from scheduler.plan import ImagePixels
from server.errors import from_image, no_room_for_pixels, too_many_images, too_many_pixels
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


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One image, ready for the prompt (`layout`) and for the engine (`pixels`). Shared between requests: read-only."""

    key: bytes
    """32 bytes, of the preprocessing, the image file and the cache salt: equal keys are equal pixels. Two files with
    equal pixels have different keys, which costs an encoding and never a wrong answer."""
    layout: Layout
    pixels: ImagePixels


class _Variant(NamedTuple):
    """What becomes of an image in requests with one, or with several."""

    recipe: Recipe
    fingerprint: bytes


class ImagePipeline:
    """Prepares the images of requests. Close it with `aclose()`."""

    def __init__(self, preprocessor: Preprocessor, limits: ImageLimits, *, fetcher: Fetcher | None = None) -> None:
        self.preprocessor = preprocessor
        self._limits = limits
        self._variants = [
            _Variant(one.recipe, bytes.fromhex(one.fingerprint())) for one in (preprocessor, preprocessor.for_images(2))
        ]
        self._fetcher = fetcher or Fetcher(limits)
        self._fetches = asyncio.Semaphore(limits.max_media_fetches)
        self._pool = ThreadPoolExecutor(usable_cores(), thread_name_prefix="image")
        self._room = PixelRoom(limits.max_decoding_pixels)
        self._flights: SingleFlight[PreparedImage] = SingleFlight()
        self._cache = _Cache(limits.image_cache_bytes)
        self._held = _Held(limits.max_queued_image_bytes)

    async def aclose(self) -> None:
        """Ends the work in progress; what a thread has begun it finishes, for nobody."""
        await self._flights.aclose()
        self._pool.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.aclose()

    def forget_unused(self) -> None:
        """Drop the images that are only kept for those who may send them again."""
        self._cache.clear()

    async def prepare(self, urls: Sequence[str], salt: bytes) -> tuple[PreparedImage, ...]:
        """The images of one request, in order. Requests with different salts share nothing, not even time.

        Raises ApiError: for more images or bytes of pixels than the limit, or for the first image that cannot be used.
        """
        if len(urls) > self._limits.limit_mm_per_prompt:
            raise too_many_images(len(urls), self._limits.limit_mm_per_prompt)
        variant = self._variants[len(urls) > 1]
        places = asyncio.Semaphore(IMAGES_AT_ONCE)
        held: list[PreparedImage] = []
        tasks = [asyncio.create_task(self._one(url, variant, salt, places, held)) for url in urls]
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
            self._held.give_back(held)
        return tuple(images)

    async def _one(
        self, url: str, variant: _Variant, salt: bytes, places: asyncio.Semaphore, held: list[PreparedImage]
    ) -> PreparedImage:
        """One image of a request that has those in `held` already."""
        async with places:
            key = (url, variant.fingerprint, salt)
            image = await self._flights.run(key, lambda: self._work(url, variant, salt))
            self._held.take(image, held)
            return image

    async def _work(self, url: str, variant: _Variant, salt: bytes) -> PreparedImage:
        """Once for all who want the URL at the same time; a fetch holds no thread."""
        if is_data_url(url):
            return await self._in_pool(lambda: decode_data_url(url, self._limits), variant, salt)
        async with self._fetches:
            body = await self._fetcher.fetch(url)
            return await self._in_pool(lambda: body, variant, salt)

    async def _in_pool(self, read: Callable[[], bytes], variant: _Variant, salt: bytes) -> PreparedImage:
        loop = asyncio.get_running_loop()
        outcome = await loop.run_in_executor(self._pool, self._outcome, read, variant, salt)
        if isinstance(outcome, ImageError):
            raise outcome
        return outcome

    def _outcome(self, read: Callable[[], bytes], variant: _Variant, salt: bytes) -> PreparedImage | ImageError:
        """Worker thread. An error is returned, not raised, without its traceback: that would keep the pixels in memory
        for as long as anybody has the error."""
        try:
            data = read()
            key = hashlib.sha256(variant.fingerprint + hashlib.sha256(data).digest() + salt).digest()
            found = self._cache.get(key)
            if found is None:
                with self._room.entered() as admit:
                    found = _cut(data, variant.recipe, key, self._limits, admit)
                found = self._cache.put(found)
        except ImageError as error:
            error.__cause__ = error.__context__ = None
            return error.with_traceback(None)
        return found


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

    @contextmanager
    def entered(self) -> Iterator[Callable[[int], None]]:
        """For the work on one image: a function that waits until that many pixels fit. What is more than the limit has
        to be alone; a large image is not overtaken. All that was taken is given back at the end."""
        taken = 0

        def admit(pixels: int) -> None:
            nonlocal taken
            with self._turn, self._changed:
                self._changed.wait_for(lambda: self._used == 0 or self._used + pixels <= self._limit)
                self._used += pixels
            taken += pixels

        try:
            yield admit
        finally:
            with self._changed:
                self._used -= taken
                self._changed.notify_all()


class _Held:
    """Counts the bytes of what is ready while its request still waits for other images. Each image counts once, whoever
    has it. Used by the event loop."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._holders: dict[int, int] = {}
        """id of the pixels of an image that is held -> how often"""

    def take(self, image: PreparedImage, held: list[PreparedImage]) -> None:
        """Adds the image to those of its request. Raises ApiError."""
        size = len(image.pixels.data)
        own = sum({id(one.pixels.data): len(one.pixels.data) for one in [*held, image]}.values())
        if own > self._limit:
            raise too_many_pixels(own, self._limit)
        pixels = id(image.pixels.data)
        new = 0 if pixels in self._holders else size
        if self._used + new > self._limit:
            raise no_room_for_pixels(self._used, new)
        self._used += new
        self._holders[pixels] = self._holders.get(pixels, 0) + 1
        held.append(image)

    def give_back(self, held: list[PreparedImage]) -> None:
        """The request needs these no longer, or is counted elsewhere."""
        for image in held:
            pixels = id(image.pixels.data)
            self._holders[pixels] -= 1
            if not self._holders[pixels]:
                del self._holders[pixels]
                self._used -= len(image.pixels.data)
        held.clear()


class _Cache:
    """The results that were wanted last, up to a number of bytes. Used by all worker threads."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0
        self._images: OrderedDict[bytes, PreparedImage] = OrderedDict()
        self._alive: WeakValueDictionary[bytes, memoryview] = WeakValueDictionary()
        """Key -> pixels that some request still has, though the cache may have dropped them."""
        self._lock = threading.Lock()

    def get(self, key: bytes) -> PreparedImage | None:
        """None where it is not there."""
        with self._lock:
            if key in self._images:
                self._images.move_to_end(key)
            return self._images.get(key)

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._images.clear()
            self._used = 0

    def put(self, image: PreparedImage) -> PreparedImage:
        """The image, with the pixels that other requests have of it, if they have: so they are in memory once, however
        often it is decoded. Makes room by dropping others; what is larger than the cache is not kept."""
        size = len(image.pixels.data)
        with self._lock:
            alive = self._alive.setdefault(image.key, memoryview(image.pixels.data))
            image = replace(image, pixels=replace(image.pixels, data=alive))
            if size <= self._limit and image.key not in self._images:
                self._images[image.key] = image
                self._used += size
            while self._used > self._limit:
                _, dropped = self._images.popitem(last=False)
                self._used -= len(dropped.pixels.data)
        return image
