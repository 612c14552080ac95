"""A projector that makes the same of every picture is found by validate, and nothing else is said to be wrong."""

from pathlib import Path

from tests.chaos.validate_broken import CASES, failed_checks


def test_a_broken_projector(tmp_path: Path) -> None:
    case = CASES["broken projector"]
    failed = failed_checks(case, tmp_path)
    assert failed.keys() == case.failed
    assert set(failed.values()) == {"the answer and its log-probabilities are the same"}
