"""`/v1/embeddings` of a real server: an embedding model's folder against transformers with the `openai` SDK, and again
in a new engine.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from openai import OpenAI

from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.end_to_end.conftest import Server, run_server

pytestmark = pytest.mark.timeout(120)

TEXTS = ("hi", "a text of some length " * 9, "Größe 👩‍👩‍👧 " * 5)
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Any]]:
    """A tiny embedding model, and transformers' of the same folder."""
    folder: Path = tmp_path_factory.mktemp("embedder")
    reference = make_checkpoint(folder, "qwen3", {})
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with run_server("--max-num-seqs", "8", "--max-num-batched-tokens", "16", model=str(folder)) as server:
        yield server, reference


def _expected(reference: Any, text: str) -> Any:
    ids = torch.tensor([make_tokenizer()(text).input_ids])
    with torch.inference_mode():
        mean = reference.model(ids).last_hidden_state[0].double().mean(dim=0)
    return (mean / mean.norm()).numpy()


def test_as_transformers(served: tuple[Server, Any]) -> None:
    """float32 numbers in both formats, bit for bit the same alone and together."""
    server, reference = served
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        together = client.embeddings.create(model=server.model, input=list(TEXTS))
        for text, entry in zip(TEXTS, together.data, strict=True):
            assert np.linalg.norm(np.array(entry.embedding) - _expected(reference, text)) <= 1e-5
            alone = client.embeddings.create(model=server.model, input=text, encoding_format="float")
            assert alone.data[0].embedding == entry.embedding
        assert together.usage.prompt_tokens == sum(len(make_tokenizer()(text).input_ids) for text in TEXTS)


def test_lost_engine(served: tuple[Server, Any]) -> None:
    """In the midst of thousands of steps; the next one goes on with what had not ended."""
    server, _ = served
    inputs = [f"{number} {TEXTS[1]}" for number in range(128)]
    undisturbed = server.post("/v1/embeddings", input=inputs)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(20):
            disturbed = pool.submit(server.post, "/v1/embeddings", input=inputs)
            server.wait_for(lambda: server.progress()["running"] > 0, 60, "a running sequence")
            if server.kill_at_work():
                break
            assert disturbed.result() == undisturbed
        assert disturbed.result() == undisturbed
    assert server.metrics()["recovery_replays_total"] > 0


def test_what_is_counted(served: tuple[Server, Any]) -> None:
    server, _ = served
    before = server.metrics()["request_success_total:stop"]
    server.post("/v1/embeddings", input=["a", "b", "c"])
    assert server.metrics()["request_success_total:stop"] == before + 3
    server.wait_for(server.is_idle, 10, "idleness")


@pytest.mark.model
def test_the_embedded_model_when_it_is_told_how(server: Server) -> None:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        texts = ["The cat sleeps.", "The kitten is sleeping.", "Interest rates rose by two per cent."]
        answer = client.embeddings.create(model=server.model, input=texts)
        cat, kitten, rates = (np.array(entry.embedding) for entry in answer.data)
        assert (len(cat), np.linalg.norm(cat)) == (576, pytest.approx(1, abs=1e-6))
        assert cat @ kitten > cat @ rates
        with pytest.raises(openai.BadRequestError, match="not trained to be cut"):
            client.embeddings.create(model=server.model, input="hi", dimensions=64)
