"""Pictures that are broken or many, and clients and engines that leave with them: nobody else suffers."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from PIL import Image

from tests.end_to_end.conftest import Server, sse_events
from tests.end_to_end.neighbour import Neighbour
from tests.end_to_end.showing import IMAGE_TOKENS, ask, picture, shows
from tests.vision.pictures import data_url, noise, png_bomb, save, smooth

BROKEN = {
    "truncated JPEG": data_url(save(Image.fromarray(smooth(300, 400)), "JPEG")[:-128], "jpeg"),
    "random bytes": data_url(bytes(noise(20, 20)), "png"),
    "a page": data_url(b"<html><body>no</body></html>", "png"),
    "a page that says so": "data:text/html;base64,PGI+",
    "nothing": data_url(b"", "png"),
    "no base64": "data:image/png;base64,%%%%",
    "SVG": data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"),
    "bomb": data_url(png_bomb(65_500)),
    "a file of the server": "file:///etc/passwd",
    "an address of the server": "http://127.0.0.1:1/x.png",
    "a host that nobody allowed": "https://example.com/x.png",
}


def test_broken_pictures_are_refused_and_nobody_else_notices(eyes: Server) -> None:
    good = shows("Here is ", picture(5))
    expected, _ = ask(eyes, good)
    with Neighbour(eyes), ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda messages: ask(eyes, messages)[0], [good] * 8)
        for name, url in BROKEN.items():
            message = shows("one", picture(6), "two")
            message[0]["content"].append({"type": "image_url", "image_url": {"url": url}})
            start = time.monotonic()
            answer = eyes.http.post("/v1/chat/completions", json={"model": eyes.model, "messages": message})
            assert answer.status_code in (400, 413), f"{name}: {answer.text}"
            assert time.monotonic() - start < 2, name
            error = answer.json()["error"]
            assert error["param"] == "messages" and "image 2" in error["message"].lower(), f"{name}: {error}"
            assert len(answer.content) < 1000
        assert all(answer == expected for answer in answers)
    assert eyes.is_ready()


def test_a_broken_picture_is_an_error_of_the_sdk(eyes: Server, eyes_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        eyes_client.chat.completions.create(model=eyes.model, messages=shows(BROKEN["random bytes"]), stream=True)


def test_the_same_picture_in_64_requests_is_encoded_once(eyes: Server) -> None:
    before = eyes.metrics()
    new = picture(900)
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda index: ask(eyes, shows(f"{index} times ", new), 2), range(64)))
    assert all(usage["prompt_tokens_details"]["image_tokens"] == IMAGE_TOKENS for _, usage in answers)
    eyes.wait_for(lambda: eyes.metrics()["images_received_total"] - before["images_received_total"] == 64, 5, "count")
    eyes.wait_for(lambda: eyes.metrics()["images_encoded_total"] > before["images_encoded_total"], 5, "encoding")
    assert eyes.metrics()["images_encoded_total"] - before["images_encoded_total"] == 1


def test_a_client_that_leaves_takes_its_pictures_along(eyes: Server) -> None:
    urls = [data_url(save(Image.fromarray(smooth(1200, 1600 + index)), "JPEG"), "jpeg") for index in range(8)]
    body = {"model": eyes.model, "messages": shows(*urls), "max_tokens": 3000, "ignore_eos": True, "n": 8}
    with pytest.raises(httpx.TimeoutException):
        eyes.http.post("/v1/chat/completions", json=body, timeout=0.3)
    eyes.wait_for(eyes.is_idle, 10, "idleness")
    assert ask(eyes, shows("Still there ", picture(1)), 4)[1]["completion_tokens"] == 4


def test_a_new_engine_is_given_the_pixels_that_the_old_one_had(eyes: Server) -> None:
    body = {
        "model": eyes.model,
        "messages": shows("Before and after ", picture(40)),
        "max_tokens": 2000,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    expected = eyes.http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]["token_ids"]
    lost = eyes.children()["engine"]

    def disturbed() -> list[Any]:
        """The chunks of a stream in whose midst the engine is killed; none where it was too late for that."""
        with (
            eyes.client() as client,
            client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as stream,
        ):
            chunks = sse_events(stream.iter_lines())
            first = next(chunks)
            return [first, *chunks] if eyes.kill_at_work() else []

    *chunks, done = next(filter(None, (disturbed() for _ in range(20))))
    token_ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert (token_ids, done) == (expected, {"done": True})
    assert eyes.children()["engine"].pid != lost.pid
    assert eyes.metrics()["recovery_resumptions_total"] > 0
    eyes.wait_for(eyes.is_idle, 10, "idleness")
