"""A model with states (Qwen3-Next, tiny) through a whole server: the same text alone, from its prefix cache, beside
others, and when its engine is killed in its midst."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import HYBRID, make_checkpoint
from tests.end_to_end.conftest import Server, run_server, sse_events

pytestmark = pytest.mark.timeout(240)

PROMPT = "All work and no play makes Jack a dull boy. " * 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    make_checkpoint(folder, "qwen3_next", HYBRID)
    return folder


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Iterator[Server]:
    """Without drafts."""
    with run_server("--max-num-seqs", "4", model=str(checkpoint)) as server:
        yield server


def body(server: Server, index: int) -> dict[str, Any]:
    return {
        "model": server.model,
        "prompt": PROMPT + str(index),
        "max_tokens": 90,
        "temperature": 1.0,
        "seed": index,
        "logit_bias": {"2": -100},
    }


def text(server: Server, index: int) -> str:
    return server.post("/v1/completions", **body(server, index))["choices"][0]["text"]


def likely(server: Server, index: int) -> dict[str, Any]:
    """A request whose answer repeats itself, mostly: greedy, of two tokens."""
    favoured = {str(token): 50 for token in (70 + index, 71 + index)}
    return body(server, index) | {"temperature": 0, "logit_bias": favoured | {"2": -100}}


def disturbed(server: Server, index: int) -> str | None:
    """The text of a stream in whose midst the engine is killed; None where it was too late for that."""
    said = ""
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json=body(server, index) | {"stream": True}) as response,
    ):
        for count, event in enumerate(sse_events(response.iter_lines())):
            if count == 10 and not server.kill_at_work():
                return None
            said += event["choices"][0]["text"] if event.get("choices") else ""
    return said


def test_the_text_is_the_same_however_it_is_computed(plain: Server) -> None:
    alone = [text(plain, index) for index in range(3)]
    assert len(set(alone)) == 3
    hits = plain.metrics()["prefix_cache_hits_total"]
    assert hits > 2 * (len(PROMPT) // 16 - 1) * 16  # the texts part in the last block
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda index: text(plain, index), range(3))) == alone
    assert plain.metrics()["prefix_cache_hits_total"] > hits
    assert next(filter(None, (disturbed(plain, 1) for _ in range(20)))) == alone[1]
    assert plain.metrics()["recovery_resumptions_total"] > 0
    plain.wait_for(plain.is_idle, 30, "idleness")


def test_drafts_change_no_text(plain: Server, checkpoint: Path) -> None:
    """Two choices of each, one after the other, side by side, and when the engine is killed."""

    def texts(server: Server, index: int) -> list[str]:
        asked = likely(server, index) if index % 2 else body(server, index)
        return [choice["text"] for choice in server.post("/v1/completions", **asked, n=2)["choices"]]

    without, expected = [texts(plain, index) for index in range(4)], text(plain, 1)
    drafts = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'
    with run_server("--max-num-seqs", "4", "--speculative-config", drafts, model=str(checkpoint)) as server:
        assert [texts(server, index) for index in range(4)] == without
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda index: texts(server, index), range(4))) == without
        accepted, drafted = (server.metrics()[f"spec_decode_num_{what}_tokens_total"] for what in ("accepted", "draft"))
        assert 20 < accepted < drafted
        assert next(filter(None, (disturbed(server, 1) for _ in range(20)))) == expected
