"""Checkpoints whose images need more than bytes on the wire, through a whole server: text as transformers'."""

from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.end_to_end.conftest import run_server
from tests.model_runtime.test_vlm import CONVERSATIONS, PICTURES, STEPS
from tests.vlm import make_vlm
from tests.vlm_engine import data_url
from tests.vlm_oracle import Messages, Oracle


def with_urls(messages: Messages, shown: list[int]) -> list[dict[str, Any]]:
    """OpenAI's form of messages whose image parts stand for these pictures in order."""
    urls = iter([data_url(PICTURES[index]) for index in shown])
    return [
        {
            "role": message["role"],
            "content": [
                {"type": "image_url", "image_url": {"url": next(urls)}} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "shared"), [("qwen3_vl", "pipeline"), ("gemma3", "context")])
def test_the_answer_is_that_of_transformers(tmp_path: Path, name: str, shared: str) -> None:
    """Rows and columns as positions, and features for several layers; images that may not be cut. In small steps, and
    by two ranks that divide layers or share sequences."""
    oracle = Oracle(name, make_vlm(tmp_path, name))
    expected = {
        key: oracle.answer(messages, [PICTURES[index] for index in shown], STEPS)
        for key, (messages, shown) in CONVERSATIONS.items()
    }
    options = ("--max-num-batched-tokens", "64", "--max-num-seqs", "8", f"--{shared}-parallel-size", "2")
    with run_server(*options, model=str(tmp_path)) as server:
        assert server.children().keys() >= {"api", "engine", "rank 1"}
        client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)
        for key, (messages, shown) in [*CONVERSATIONS.items(), *CONVERSATIONS.items()]:
            answer = client.chat.completions.create(
                model=server.model,
                messages=with_urls(messages, shown),  # type: ignore[arg-type]
                temperature=0,
                max_tokens=STEPS,
                n=2,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            document = answer.model_dump()
            assert document["prompt_token_ids"] == expected[key].prompt_ids
            for choice in document["choices"]:
                assert choice["token_ids"] == expected[key].continuation
        client.close()
        server.wait_for(server.is_idle, 30, "idleness")
