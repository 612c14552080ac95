"""The line through the cost of a token by context is the least-squares one, and is held against the right limit."""

from pathlib import Path

import pytest

from tests.docs.scripts import load_script


def rows(sequences: int) -> list[dict[str, float]]:
    """Steps of 10 ms and 3 us for each key."""
    return [
        {"sequences": sequences, "context": n, "step_ms": 10 + 0.003 * sequences * n, "kv_token_bytes": 40_000}
        for n in (100, 1000, 8000)
    ]


def test_fit_and_figure(tmp_path: Path) -> None:
    contexts = load_script("contexts")
    groups = [rows(1), rows(4)]
    lines = [contexts.fit(group, 20e9) for group in groups]
    for line in lines:
        assert line.start_ms == pytest.approx(10)
        assert line.slope_us == pytest.approx(3)
        assert line.limit_us == pytest.approx(2)
        assert line.largest_error == pytest.approx(0, abs=1e-9)
    assert "| 4 | 10.0 | 3.00 | 2.00 | 1.50 | 0% |" in contexts.table(lines)
    contexts.draw(groups, lines, tmp_path / "contexts.png")
    assert (tmp_path / "contexts.png").read_bytes().startswith(b"\x89PNG")
