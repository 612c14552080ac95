"""The check of speculation finds nothing where there is nothing to find, and finds what is there."""

import sys
from pathlib import Path

import pytest

from scheduler import outcome
from server import speculation_check
from tests.checkpoints import make_checkpoint

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "llama", {"num_hidden_layers": 1, "max_position_embeddings": 4096})
    return path


@pytest.fixture
def words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line; few prompts and answers."""
    size = ["--prompts", "16", "--max-tokens", "12", "--max-model-len", "4096", "--accepted", "0", "--rejected", "1"]
    words = ["speculation_check", str(folder), "--threads", "1", *size, "--speculative-config", NGRAM]
    monkeypatch.setattr(speculation_check, "PRESSED_TOKENS", 2000)
    monkeypatch.setattr(sys, "argv", words)
    return words


def test_equal_outputs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_of:
        speculation_check.main()
    assert exit_of.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0] for line in lines[:3]] == [
        "alone: 0 of 16 differ",
        "among 32 others: 0 of 16 differ",
        "with preemption: 0 of 16 differ",
    ]
    assert [line.split(":")[0].strip() for line in lines[3:]] == ["greedy", "top_p", "penalties", "min_p, penalty"]


def test_too_few_drafts(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """That nothing differs says nothing where nothing was drafted."""
    monkeypatch.setattr(sys, "argv", [*words[:-4], "--accepted", "1000000", *words[-2:]])
    with pytest.raises(SystemExit) as exit_of:
        speculation_check.main()
    assert exit_of.value.code == 1
    assert capsys.readouterr().out.endswith(
        "too few drafts to say anything: greedy, top_p, penalties, min_p, penalty\n"
    )


def test_outputs_that_differ(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every draft is taken to hold."""
    monkeypatch.setattr(outcome, "verify", lambda sampled, drafts: len(drafts))
    with pytest.raises(SystemExit) as exit_of:
        speculation_check.main()
    assert exit_of.value.code == 1
    assert "alone: 0 of 16" not in capsys.readouterr().out


def test_speculation_must_be_configured(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", words[:-2])
    with pytest.raises(SystemExit, match="--speculative-config says what to check"):
        speculation_check.main()
