"""The embedded model with an image side, here of noise, answers text as it does without one, bit for bit, whoever shows
pictures meanwhile."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from server.embedded import embedded_path
from tests.end_to_end.conftest import Server, run_server
from tests.end_to_end.showing import picture, shows
from tests.vision.embedded.tiny import SMALL, write_random_eyes
from vision.embedded.language import read_weights

pytestmark = pytest.mark.model
TEXTS = ("What is the capital of France?", "Write a line about the sea.", "Count to five.", "Name a bird.")
STEPS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eyes")
    write_random_eyes(path, read_weights())
    return path


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[Server]:
    with run_server("--mmproj", str(folder)) as running:
        yield running


def answer(server: Server, messages: Any, salt: str) -> tuple[list[int], list[float], dict[str, Any]]:
    """Token ids, their log-probabilities, usage."""
    options = {"max_tokens": STEPS, "temperature": 0, "logprobs": True, "return_token_ids": True, "cache_salt": salt}
    found = server.post("/v1/chat/completions", messages=messages, **options)
    choice = found["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]], found["usage"]


def test_texts_beside_pictures_are_those_of_the_model_alone(seeing: Server) -> None:
    def mixed(index: int) -> tuple[list[int], list[float], dict[str, Any]]:
        text = TEXTS[index // 2]
        return answer(seeing, shows(picture(index), text) if index % 2 else shows(text), "together")

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(mixed, range(2 * len(TEXTS))))
    with run_server(model=str(embedded_path())) as plain:
        for index, text in enumerate(TEXTS):
            ids, logprobs, usage = answer(plain, shows(text), "alone")
            assert together[2 * index][:2] == (ids, logprobs), text
            assert usage["prompt_tokens"] == together[2 * index][2]["prompt_tokens"]
        refused = plain.http.post("/v1/chat/completions", json={"model": plain.model, "messages": shows(picture(0))})
        assert refused.status_code == 400 and "does not accept images" in refused.text
    for index in range(len(TEXTS)):
        shown, read = together[2 * index + 1], together[2 * index]
        assert shown[2]["prompt_tokens_details"]["image_tokens"] == SMALL.grid**2
        assert shown[0] != read[0]


def test_another_picture_is_another_answer(seeing: Server) -> None:
    answers = [answer(seeing, shows(picture(seed), TEXTS[0]), "pictures")[1] for seed in (1, 2, 1)]
    assert answers[0] == answers[2] != answers[1]


def test_ranks_share_it(folder: Path, seeing: Server) -> None:
    """Beside integers they differ from one rank in the third digit of log-probabilities."""
    messages = shows(picture(3), TEXTS[0])
    expected = answer(seeing, messages, "ranks")
    with run_server("--mmproj", str(folder), "--tensor-parallel-size", "2") as ranks:
        found = answer(ranks, messages, "ranks")
        assert found[2]["prompt_tokens"] == expected[2]["prompt_tokens"]
        assert found[0][0] == expected[0][0] and found[1][0] == pytest.approx(expected[1][0], abs=0.05)


def test_a_folder_that_does_not_fit_ends_the_start(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the server did not start"), run_server("--mmproj", str(tmp_path)):
        pass
