"""Pictures through a real server with a tiny vision model: what applications send, what attackers send, who suffers."""

import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai import OpenAI
from PIL import Image

from server.tiny_vlm import write_tiny_vlm
from tests.end_to_end.conftest import Server, run_server, sse_events
from tests.end_to_end.neighbour import Neighbour
from tests.end_to_end.raw_http import waited_for_a_core
from tests.vision.pictures import FILES, data_url, exif, noise, png_bomb, save, smooth

IMAGE_TOKENS = 16
IMAGE_TOKEN_ID = 259
FRAME = 1 + len("USER: \nASSISTANT: ")
"""Tokens that the template adds to a user's text: one that begins, and one for each byte."""
BLOCK = 16
MAX_PROBE_SECONDS = 0.25


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tiny-vlm")
    write_tiny_vlm(folder)
    with run_server(model=str(folder)) as running:
        yield running


@pytest.fixture
def client(eyes: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=eyes.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def picture(seed: int, height: int = 60, width: int = 80) -> str:
    """Flat squares of 20 pixels: small files whose every picture looks different to the tower."""
    squares = np.random.default_rng(seed).integers(0, 256, (height // 20, width // 20, 3), dtype=np.uint8)
    return data_url(save(Image.fromarray(squares.repeat(20, 0).repeat(20, 1)), "PNG"))


def shows(*parts: str) -> Any:
    """A user's message; parts that are data URLs are pictures."""
    return [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": part}}
                if part.startswith("data:")
                else {"type": "text", "text": part}
                for part in parts
            ],
        }
    ]


def ask(server: Server, messages: Any, max_tokens: int = 16) -> tuple[list[int], dict[str, Any]]:
    """Greedy token ids, and usage."""
    answer = server.post(
        "/v1/chat/completions", messages=messages, max_tokens=max_tokens, temperature=0, return_token_ids=True
    )
    return answer["choices"][0]["token_ids"], answer["usage"]


def prompt_ids(server: Server, messages: Any) -> list[int]:
    return list(server.post("/tokenize", messages=messages)["tokens"])


def test_the_sdk_shows_a_picture(eyes: Server, client: OpenAI) -> None:
    messages = shows("What is ", picture(1), "this?")
    options: Any = {"model": eyes.model, "messages": messages, "max_tokens": 12, "temperature": 0, "n": 2}
    whole = client.chat.completions.create(**options)
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    text = whole.choices[0].message.content
    assert text and whole.choices[1].message.content == text
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.to_dict()["image_tokens"] == IMAGE_TOKENS
    assert whole.usage.prompt_tokens == len(prompt_ids(eyes, messages)) == FRAME + len("What is \nthis?") + IMAGE_TOKENS
    texts, usage = ["", ""], None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    assert texts == [text, text]
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.to_dict()["image_tokens"] == IMAGE_TOKENS
    assert usage.completion_tokens == 24


def test_order_and_number_of_pictures_matter(eyes: Server) -> None:
    first, second = picture(1), picture(2)
    prompts = [
        shows(first, "or", second),
        shows(second, "or", first),
        shows(first, "or", first),
        shows("or", first, second),
        shows(first, "or"),
    ]
    answers = [ask(eyes, messages)[0] for messages in prompts]
    assert len({tuple(answer) for answer in answers}) == len(prompts)
    found = [prompt_ids(eyes, messages).count(IMAGE_TOKEN_ID) // IMAGE_TOKENS for messages in prompts]
    assert found == [2, 2, 2, 2, 1]


def test_the_same_text_with_another_picture(eyes: Server) -> None:
    """Bar 2: A, A, B, A."""
    text = "Tell me about the following picture, please: "
    questions = [shows(text, picture(seed), " What do you see?") for seed in (11, 11, 12, 11)]
    answers = [ask(eyes, question) for question in questions]
    texts = [ids for ids, _ in answers]
    assert texts[0] == texts[1] == texts[3] != texts[2]
    length, before = answers[0][1]["prompt_tokens"], 1 + len(f"USER: {text}")
    expected = [0, (length - 1) // BLOCK * BLOCK, before // BLOCK * BLOCK, (length - 1) // BLOCK * BLOCK]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for _, usage in answers] == expected
    assert 0 < expected[2] < expected[1]


@pytest.mark.parametrize("literal", ["<image>", "<|image_pad|>", "<|vision_start|>", "<|im_end|>", "</s>", "<s>"])
def test_what_a_user_types_is_no_picture(eyes: Server, literal: str) -> None:
    """Bar 5: with no picture and with one, of which the text is on either side."""
    plain = shows(f"Is {literal} a word?")
    ids, usage = ask(eyes, plain, 2)
    assert len(ids) == 2 and "image_tokens" not in usage["prompt_tokens_details"]
    spelled = prompt_ids(eyes, plain)
    assert IMAGE_TOKEN_ID not in spelled and len(spelled) == FRAME + len(f"Is {literal} a word?")
    both = shows(f"Is {literal}", picture(3), f"like {literal}?")
    ids, usage = ask(eyes, both, 2)
    assert len(ids) == 2 and usage["prompt_tokens_details"]["image_tokens"] == IMAGE_TOKENS
    seen = prompt_ids(eyes, both)
    start = 1 + len(f"USER: Is {literal}")
    assert [index for index, token in enumerate(seen) if token == IMAGE_TOKEN_ID] == list(range(start, start + 16))


@pytest.mark.model
def test_a_model_of_text_refuses_pictures(server: Server) -> None:
    for url in (picture(1), "https://example.com/x.png", "data:image/png;base64,AAAA", "nothing"):
        message = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        answer = server.http.post("/v1/chat/completions", json={"model": server.model, "messages": message})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert "does not accept images" in error["message"] and error["param"] == "messages"


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


def test_a_broken_picture_is_an_error_of_the_sdk(eyes: Server, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=eyes.model, messages=shows(BROKEN["random bytes"]), stream=True)


def test_the_same_picture_in_64_requests_is_encoded_once(eyes: Server) -> None:
    before = eyes.metrics()
    new = picture(900)
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda index: ask(eyes, shows(f"{index} times ", new), 2), range(64)))
    assert all(usage["prompt_tokens_details"]["image_tokens"] == IMAGE_TOKENS for _, usage in answers)
    eyes.wait_for(lambda: eyes.metrics()["images_received_total"] - before["images_received_total"] == 64, 5, "count")
    eyes.wait_for(lambda: eyes.metrics()["images_encoded_total"] > before["images_encoded_total"], 5, "encoding")
    assert eyes.metrics()["images_encoded_total"] - before["images_encoded_total"] == 1


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


def upright() -> Image.Image:
    """Flat squares of 16 pixels, which JPEG keeps as they are, without symmetry."""
    squares = np.random.default_rng(7).integers(0, 2, (5, 7, 3), dtype=np.uint8) * 255
    return Image.fromarray(squares.repeat(16, 0).repeat(16, 1))


STORED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""How a camera that was turned stores what is upright (EXIF 2.32, 4.6.4 A, Orientation)."""
LOSSLESS: dict[str, dict[str, object]] = {
    "JPEG": {"quality": 100, "subsampling": 0},
    "PNG": {},
    "WEBP": {"lossless": True, "exact": True},
}


@pytest.mark.parametrize("kind", LOSSLESS)
def test_a_picture_stored_turned_is_the_picture(eyes: Server, kind: str) -> None:
    def answer(image: Image.Image, **options: object) -> list[int]:
        file = save(image, kind, **LOSSLESS[kind], **options)
        return ask(eyes, shows("Which way is up? ", data_url(file, kind.lower())), 8)[0]

    expected = answer(upright())
    turned = {orientation: upright().transpose(stored) for orientation, stored in STORED.items()}
    for orientation, image in turned.items():
        assert answer(image, exif=b"Exif\0\0" + exif(orientation)) == expected, f"orientation {orientation}"
    assert [answer(image) for image in turned.values()].count(expected) < 4, "the answer tells the turns apart"


def test_every_format_and_a_phone_photograph(eyes: Server) -> None:
    for name, file in FILES.items():
        _, usage = ask(eyes, shows("Kind ", data_url(file, name.partition("-")[0])), 1)
        assert usage["prompt_tokens_details"]["image_tokens"] == IMAGE_TOKENS, name
    photo = BytesIO()
    Image.fromarray(smooth(378, 504)).resize((4032, 3024)).save(photo, "JPEG", quality=90, exif=b"Exif\0\0" + exif(6))
    _, usage = ask(eyes, shows("Photo ", data_url(photo.getvalue(), "jpeg")), 1)
    assert usage["prompt_tokens_details"]["image_tokens"] == IMAGE_TOKENS


def test_the_number_of_pictures_is_limited(eyes: Server) -> None:
    body = {"model": eyes.model, "messages": shows(*[picture(1)] * 65)}
    answer = eyes.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "64" in answer.json()["error"]["message"] and "65" in answer.json()["error"]["message"]


def test_a_client_that_leaves_takes_its_pictures_along(eyes: Server) -> None:
    urls = [data_url(save(Image.fromarray(smooth(1200, 1600 + index)), "JPEG"), "jpeg") for index in range(8)]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            eyes.url + "/v1/chat/completions",
            json={"model": eyes.model, "messages": shows(*urls), "max_tokens": 3000, "ignore_eos": True},
            timeout=0.3,
        )
    eyes.wait_for(eyes.is_idle, 10, "idleness")
    assert ask(eyes, shows("Still there ", picture(1)), 4)[1]["completion_tokens"] == 4


def test_a_new_engine_is_given_the_pixels_that_the_old_one_had(eyes: Server) -> None:
    messages = shows("Before and after ", picture(40))
    expected, _ = ask(eyes, messages)
    body = {"model": eyes.model, "messages": messages, "max_tokens": 3900, "ignore_eos": True, "stream": True}
    with eyes.client() as other, other.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        eyes.children()["engine"].kill()
        *_, error, done = sse_events(lines)
    assert "error" in error and done == {"done": True}
    eyes.wait_for(lambda: "engine" in eyes.children() and eyes.is_ready(), 30, "readiness")
    assert ask(eyes, messages)[0] == expected
