"""Speed of the image pipeline beside what Pillow alone reaches: `python -m server.image_bench`.

For whoever changes the pipeline or a recipe. 64 requests at the same time, one JPEG each (quality 88, 4:2:0, noise on a
coarse gradient), of 224 to 1024 pixels a side, for a model that takes 336 x 336. Pillow alone opens, decodes, resizes
and crops the same files and hands their pixels out (`tobytes`), in as many threads as there are cores, without base64,
hash, checks, cache or event loop. Each figure is the best of some rounds. Processor seconds of both mean more than the
clock where other programs are running; lag is the longest that the event loop was kept from running in the best round.
"""

import argparse
import asyncio
import base64
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import NamedTuple

import numpy as np
import PIL
from PIL import Image

from model_runtime.host import usable_cores
from server.images import ImagePipeline
from vision.config import Preprocessor, read_preprocessor
from vision.limits import ImageLimits

SIDE, IMAGES = 336, 64
SIZES = ((224, 224), (336, 448), (512, 512), (640, 480), (768, 1024), (1024, 1024))
"""(height, width)"""
TICK_SECONDS = 0.005


def preprocessor() -> Preprocessor:
    """LLaVA 1.5's."""
    vision = {"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": 14}
    model = {"model_type": "llava", "image_token_id": 0, "vision_config": vision}
    return read_preprocessor({"size": SIDE, "crop_size": SIDE}, None, model)


def photograph(height: int, width: int, seed: int) -> bytes:
    """A JPEG file with about as many bytes per pixel as a photograph has."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (height // 32 + 1, width // 32 + 1, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = np.clip(smooth + draw.integers(-6, 7, (height, width, 1), dtype=np.int16), 0, 255).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=88)
    return file.getvalue()


def _pillow(data: bytes) -> bytes:
    with Image.open(BytesIO(data)) as image:
        image.load()
        scale = SIDE / min(image.size)
        size = (int(image.width * scale), int(image.height * scale))
        left, top = (size[0] - SIDE) // 2, (size[1] - SIDE) // 2
        resized = image.resize(size, Image.Resampling.BICUBIC)
        return resized.crop((left, top, left + SIDE, top + SIDE)).tobytes()


class Taken(NamedTuple):
    """Seconds."""

    clock: float
    processor: float
    lag: float = 0.0


def pillow_alone(files: list[bytes]) -> Taken:
    """All files, in one thread for each core."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        list(pool.map(_pillow, files[:4]))
        start, used = time.perf_counter(), time.process_time()
        list(pool.map(_pillow, files))
        return Taken(time.perf_counter() - start, time.process_time() - used)


async def measured(work: Callable[[], Awaitable[object]]) -> Taken:
    """The work, while a task beside it only wants to sleep a moment again and again: how late was it?"""
    late = [0.0]

    async def watch() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(TICK_SECONDS)
            late.append(time.perf_counter() - start - TICK_SECONDS)

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(TICK_SECONDS)
    start, used = time.perf_counter(), time.process_time()
    await work()
    seconds, used = time.perf_counter() - start, time.process_time() - used
    await asyncio.sleep(TICK_SECONDS)
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    return Taken(seconds, used, max(late))


async def _pipeline(urls: list[str]) -> Taken:
    pipeline = ImagePipeline(preprocessor(), ImageLimits(image_cache_bytes=0))
    await pipeline.prepare(urls[:4], b"")
    found = await measured(lambda: asyncio.gather(*(pipeline.prepare([url], b"") for url in urls)))
    await pipeline.aclose()
    return found


def main() -> None:
    """Prints one line for each size."""
    parser = argparse.ArgumentParser(description=(sys.modules[__name__].__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement; the best counts (default: 3)")
    rounds = parser.parse_args().rounds
    print(f"{usable_cores()} cores, Pillow {PIL.__version__}, {IMAGES} requests at the same time")
    print(
        f"{'height x width':>15} {'KiB':>5} {'Pillow/s':>9} {'here/s':>7} {'share':>6} {'processor':>10} {'lag ms':>7}"
    )
    for name, sizes in (*((f"{height} x {width}", ((height, width),)) for height, width in SIZES), ("mixed", SIZES)):
        files = [photograph(*sizes[seed % len(sizes)], seed) for seed in range(IMAGES)]
        urls = ["data:image/jpeg;base64," + base64.b64encode(data).decode() for data in files]
        # in turns, so that both meet the same neighbours
        pairs = [(pillow_alone(files), asyncio.run(_pipeline(urls))) for _ in range(rounds)]
        alone, here = min(pair[0].clock for pair in pairs), min(pair[1] for pair in pairs)
        share = min(pair[0].processor for pair in pairs) / min(pair[1].processor for pair in pairs)
        print(
            f"{name:>15} {sum(map(len, files)) / IMAGES / 1024:5.0f} {IMAGES / alone:9.0f} "
            f"{IMAGES / here.clock:7.0f} {alone / here.clock:6.0%} {share:10.0%} {here.lag * 1e3:7.1f}"
        )


if __name__ == "__main__":
    main()
