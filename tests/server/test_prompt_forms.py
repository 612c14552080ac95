"""Forms of publishers' templates that read content in ways of their own: no text of a message gets lost."""

import asyncio

import pytest

from server.prompt.build import PromptBuilder
from tests.server.image_fakes import LENGTH, family, image_part, prepared
from vision.placeholders import Tiles

FIRST_PART = (
    "{% for message in messages %}[{{ message['role'] }}]"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['role'] != 'user' %}{{ message['content'][0]['text'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{% endfor %}"
)
"""Gemma 3 and Mistral-Small-3.1 read no part but the first of a message that cannot hold images."""
STRINGS_BUT_USERS = FIRST_PART.replace("message['content'][0]['text']", "message['content'] + ''")
"""Pixtral adds strings to it, and fails on a list."""
FIRST_PART_ALWAYS = FIRST_PART.replace("message['content'] is string", "message['content'] == 0")
"""LLaVA-NeXT knows no strings."""
OTHER_KEY = FIRST_PART.replace("part['text']", "part['content']")
"""The first Pixtral expects a part's text under `content`."""
TEXT_ALONE = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
"""A model of text with an image side: LLaVA's own template has all images of a message first."""


def text_part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("template", "user"),
    [
        (FIRST_PART, "x<image><image>y"),
        (STRINGS_BUT_USERS, "x<image><image>y"),
        (FIRST_PART_ALWAYS, "x<image><image>y"),
        (OTHER_KEY, "x\n<image><image>\ny"),
        (TEXT_ALONE, "<image><image>\nx\ny"),
    ],
)
def test_every_part_of_every_message_is_shown(template: str, user: str) -> None:
    tokenizer, preprocessor = family(template, Tiles(per_tile=2), ["<image>"])
    messages: list[dict[str, object]] = [
        {"role": "system", "content": [text_part("one"), text_part("two")]},
        {"role": "user", "content": [text_part("x"), image_part(), text_part("y")]},
        {"role": "assistant", "content": [text_part("three"), text_part("four")]},
    ]
    builder = PromptBuilder(tokenizer, preprocessor)
    prompt = asyncio.run(builder.chat(messages, [prepared(28, 28)], max_model_len=LENGTH))
    expected = f"[system]one\ntwo[user]{user}[assistant]three\nfour"
    assert prompt.ids == tokenizer.encode(expected, add_special_tokens=False, allow_special=True)
    assert [span[1:] for span in prompt.images.spans] == [(2, 0, 0)]
