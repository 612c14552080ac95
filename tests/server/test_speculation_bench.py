"""The benchmark of speculation compares equal answers, and says what it cannot measure."""

import json
import sys
from pathlib import Path

import pytest

from server import speculation_bench
from server.embedded import embedded_path
from server.speculation_bench import copy_prompts
from tests.checkpoints import make_checkpoint

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "llama", {"num_hidden_layers": 1, "max_position_embeddings": 512})
    return path


def test_random_prompts(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--random", "3", "--max-tokens", "8", "--runs", "1", "--threads", "1", "--json"]
    command = ["speculation_bench", str(folder), "--speculative-config", NGRAM, *words]
    monkeypatch.setattr(sys, "argv", command)
    speculation_bench.main()
    row = json.loads(capsys.readouterr().out)
    assert (row["prompts"], row["sequences"]) == ("random", 3)
    assert row["ratio"] > 0
    assert row["tokens_per_step"] >= 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--random", "2"], "--speculative-config says what to measure"),
        (["--speculative-config", NGRAM], "at most 512"),
    ],
)
def test_what_cannot_be_measured_is_said(
    folder: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["speculation_bench", str(folder), "--threads", "1", *words])
    with pytest.raises(SystemExit, match=message):
        speculation_bench.main()


def test_answers_repeat_what_is_in_their_prompts() -> None:
    prompts = dict(copy_prompts(embedded_path()))
    assert list(prompts) == ["letter", "report", "recipe", "minutes", "python", "javascript", "sql", "json"]
    assert all(300 < len(ids) < 700 for ids in prompts.values())
