"""Pictures through a real server with a tiny vision model: what is made of them."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from PIL import Image

from tests.end_to_end.conftest import Server
from tests.end_to_end.showing import IMAGE_TOKENS, ask, picture, shows
from tests.vision.pictures import FILES, data_url, exif, save, smooth

IMAGE_TOKEN_ID = 259
FRAME = 1 + len("USER: \nASSISTANT: ")
"""Tokens that the template adds to a user's text: one that begins, and one for each byte."""
BLOCK = 16


def prompt_ids(server: Server, messages: Any) -> list[int]:
    return list(server.post("/tokenize", messages=messages)["tokens"])


def test_the_sdk_shows_a_picture(eyes: Server, eyes_client: OpenAI) -> None:
    messages = shows("What is ", picture(1), "this?")
    options: Any = {"model": eyes.model, "messages": messages, "max_tokens": 12, "temperature": 0, "n": 2}
    whole = eyes_client.chat.completions.create(**options)
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    text = whole.choices[0].message.content
    assert text and whole.choices[1].message.content == text
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.to_dict()["image_tokens"] == IMAGE_TOKENS
    assert whole.usage.prompt_tokens == len(prompt_ids(eyes, messages)) == FRAME + len("What is \nthis?") + IMAGE_TOKENS
    texts, usage = ["", ""], None
    for chunk in eyes_client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
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
