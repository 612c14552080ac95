"""The benchmark of speculation compares equal answers, and says what it cannot measure."""

import json
import sys
from difflib import SequenceMatcher
from pathlib import Path

import pytest

from server import speculation_bench
from server.copy_prompts import PROMPTS, copy_prompts
from server.embedded import embedded_path
from tests.checkpoints import make_checkpoint

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "llama", {"num_hidden_layers": 1, "max_position_embeddings": 512})
    return path


@pytest.mark.parametrize("kind", ["random", "misleading"])
def test_many_at_once(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--{kind}", "3", "--max-tokens", "8", "--runs", "1", "--threads", "1", "--json"]
    command = ["speculation_bench", str(folder), "--speculative-config", NGRAM, *words]
    monkeypatch.setattr(sys, "argv", command)
    speculation_bench.main()
    row = json.loads(capsys.readouterr().out)
    assert (row["prompts"], row["sequences"]) == (kind, 3)
    assert row["ratio"] > 0
    assert (row["drafted"] > 0) == (kind == "misleading")
    assert row["accepted"] < 5
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
    assert len(prompts) == 10
    assert all(400 < len(ids) < 600 for ids in prompts.values())
    for prompt in json.loads(PROMPTS.read_text()):
        document = prompt["request"].split("nothing else.\n\n")[1]
        assert 0.9 < SequenceMatcher(None, document, prompt["answer"], autojunk=False).ratio() < 1
