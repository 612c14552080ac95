"""Many conversations with the same few pictures at once, in memory for hardly any of them, are answered as alone."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import Server, run_server
from tests.vision.preprocess_pictures import as_pil, picture
from tests.vlm import make_vlm
from tests.vlm_engine import data_url

CONVERSATIONS = 30
SMALL = {
    "--max-num-seqs": "12",
    "--max-num-batched-tokens": "48",
    "--num-kv-blocks": "40",
    "--max-model-len": "640",
    "--encoder-cache-bytes": "16KiB",
}
"""KV for 640 tokens, embeddings of one to four pictures."""


def conversation(generator: random.Random, urls: list[str]) -> list[dict[str, Any]]:
    """A message of one to four texts, with a picture before about half of them."""
    parts: list[dict[str, Any]] = []
    for _ in range(generator.randrange(1, 5)):
        if generator.random() < 0.55:
            parts.append({"type": "image_url", "image_url": {"url": generator.choice(urls)}})
        parts.append({"type": "text", "text": "word " * generator.randrange(1, 12) + str(generator.randrange(10))})
    return [{"role": "user", "content": parts}]


def bodies(model: str) -> list[dict[str, Any]]:
    """Greedy and sampled requests."""
    generator = random.Random(5)
    urls = [data_url(as_pil(picture(40 + 7 * index, 120 - 11 * index, index))) for index in range(6)]
    return [
        {
            "model": model,
            "messages": conversation(generator, urls),
            "temperature": generator.choice([0, 0.9]),
            "seed": index,
            "max_tokens": generator.randrange(4, 30),
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for index in range(CONVERSATIONS)
    ]


def answer(server: Server, body: dict[str, Any], timeout: float = 60.0) -> list[int]:
    response = server.http.post("/v1/chat/completions", json=body, timeout=timeout)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"][0]["token_ids"])


def leave(server: Server, body: dict[str, Any]) -> None:
    """A client that does not wait."""
    try:
        answer(server, body, timeout=0.05)
    except httpx.TimeoutException:
        return


@pytest.fixture(params=["gemma3", "qwen3_vl"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    make_vlm(tmp_path, request.param)
    options = [word for option in SMALL.items() for word in option]
    with run_server(*options, model=str(tmp_path)) as running:
        yield running


def test_everybody_is_answered_as_alone(small: Server) -> None:
    asked = bodies(small.model)
    alone = [answer(small, body) for body in asked]
    order = [index for index in range(CONVERSATIONS) for _ in range(2)]
    random.Random(1).shuffle(order)

    def ask(index: int) -> bool:
        if index % 5 == 3:
            leave(small, asked[index])
        return answer(small, asked[index]) == alone[index]

    before = small.metrics()["images_encoded_total"]
    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(ask, order))
    small.wait_for(
        lambda: small.metrics()["images_encoded_total"] > before, 5, "that an evicted picture is encoded again"
    )
    small.wait_for(small.is_idle, 10, "idleness")
