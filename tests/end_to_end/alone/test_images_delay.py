"""Many pictures at once, while others' probes and tokens go on."""

import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

from PIL import Image

from tests.end_to_end.conftest import Server
from tests.end_to_end.raw_http import waited_for_a_core
from tests.end_to_end.showing import IMAGE_TOKENS, ask, shows
from tests.vision.pictures import data_url, save, smooth

MAX_PROBE_SECONDS = 0.25


def commented(file: bytes, comment: bytes) -> bytes:
    """The JPEG file with a comment: the same picture, and to a cache another."""
    return file[:2] + b"\xff\xfe" + struct.pack(">H", 2 + len(comment)) + comment + file[2:]


def test_forty_pictures_delay_nobody(eyes: Server) -> None:
    """Of 3 megapixels each, among others' probes and tokens."""
    photo = save(Image.fromarray(smooth(1536, 2048)), "JPEG", quality=75)
    urls = [data_url(commented(photo, b"%d" % index), "jpeg") for index in range(40)]
    usages: list[dict[str, Any]] = []
    sender = threading.Thread(target=lambda: usages.append(ask(eyes, shows("What ", *urls), 1)[1]))
    api, probes, arrivals = eyes.children()["api"].pid, [], []
    body = {"prompt": "On and on", "max_tokens": 4000, "ignore_eos": True, "stream": True}

    def read(lines: Iterator[str]) -> None:
        for line in lines:
            if line:
                arrivals.append(time.monotonic())
            if usages:
                break

    with eyes.client() as other, other.stream("POST", "/v1/completions", json={"model": eyes.model, **body}) as stream:
        reader = threading.Thread(target=read, args=[stream.iter_lines()])
        reader.start()
        eyes.wait_for(lambda: bool(arrivals), 10, "the first token")
        start = time.monotonic()
        sender.start()
        while sender.is_alive():
            waited, begin = waited_for_a_core(api), time.monotonic()
            eyes.http.get("/health/live").raise_for_status()
            probes.append(time.monotonic() - begin - (waited_for_a_core(api) - waited))
            time.sleep(0.02)
        end = time.monotonic()
        reader.join(60)
        assert not reader.is_alive()
    assert usages[0]["prompt_tokens_details"]["image_tokens"] == 40 * IMAGE_TOKENS
    assert len(probes) > 10 and max(probes) < MAX_PROBE_SECONDS
    assert len([moment for moment in arrivals if start < moment < end]) > 20, "the stream goes on"
    eyes.wait_for(eyes.is_idle, 10, "idleness")
