"""Conversations with pictures for a server of the tiny vision model."""

from typing import Any

import numpy as np
from PIL import Image

from tests.end_to_end.conftest import Server
from tests.vision.pictures import data_url, save

IMAGE_TOKENS = 16


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
