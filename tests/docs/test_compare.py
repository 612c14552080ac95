"""The tables of docs/benchmarks are medians, ratios of medians and shares of the machine's limits."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.docs.scripts import load_script


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    return load_script("compare")


def row(subject: str, prefill: float, decode: float) -> dict[str, Any]:
    rates = {"prefill_tok_s": prefill, "decode_tok_s": decode, "weight_bytes": 100_000_000}
    return {"subject": subject, "busy_percent": 1.0, "sequences": 1, "engine": subject.split()[0]} | rates


def test_report(compare: ModuleType) -> None:
    limits = {"subject": "machine", "engine": "machine", "busy_percent": 0.0, "read_gb_s": 20.0, "fp32_gflop_s": 212.4}
    rows = [
        limits,
        *(row("firstlight Q8_0", 500.0, rate) for rate in (100.0, 150.0, 999.0)),
        *(row("llama.cpp Q8_0", 400.0, rate) for rate in (60.0, 75.0, 1.0)),
    ]
    report = compare.report(compare.Results({"sequences": [1]}, rows))
    assert "| firstlight Q8_0 | 500.0 | 150.0 |" in report
    assert "| firstlight Q8_0 / llama.cpp Q8_0 | 1.25 (bar 1.5: **missed**) | 2.50 (bar 1.5) |" in report
    # 150 times 100 MB a second of 20 GB/s; 500 tokens of 0.2124 GFLOP of 212.4 GFLOP/s
    assert "| firstlight Q8_0 | 95 | 15.0 GB/s, 75% | 106 GFLOP/s, 50% |" in report
    assert "vLLM" not in report, "what did not run is left out"
    assert "* others_busy_percent: 1.0" in report


def test_commands_name_each_peers_own_python(compare: ModuleType) -> None:
    arguments = compare._parser().parse_args(["models", "--llamacpp", "/there/python", "--sequences", "1,2"])
    jobs = dict(compare._jobs(arguments))
    assert "machine" in jobs and "vLLM float32" not in jobs and "transformers float32" not in jobs
    command = jobs["llama.cpp Q4_0"]
    assert command[0] == "/there/python" and command[2:] == ["models/q4_0.gguf", "128", "64", "1,2", "2"]
    ours = jobs["firstlight int8"]
    assert ours[1:4] == ["-m", "server.engine_bench", "models/bfloat16"] and ours[-2:] == ["--quantization", "int8"]


def printing(values: dict[str, Any], ending: str = "") -> list[str]:
    """A command that prints a JSON line and then does what `ending` says."""
    return [sys.executable, "-c", f"print({json.dumps(values)!r}, flush=True); {ending}"]


def test_a_round_that_is_cut_off_has_written_the_runs_before(
    compare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rates = {"engine": "any", "sequences": 1, "prefill_tok_s": 100.0, "decode_tok_s": 10.0, "weight_bytes": 1}
    jobs = [
        ("firstlight Q8_0", printing(rates)),
        ("llama.cpp Q8_0", printing(rates, "raise SystemExit('out of memory')")),
        ("vLLM float32", [sys.executable, "-c", "raise SystemExit(3)"]),
        ("firstlight Q4_0", printing(rates)),
    ]
    busy = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(compare, "_jobs", lambda arguments: jobs)
    monkeypatch.setattr(compare, "_busy_percent", lambda: next(busy))
    file = tmp_path / "runs.json"
    with pytest.raises(StopIteration):
        compare.measure(compare._parser().parse_args(["models", "--sequences", "1,4", "--output", str(file)]))
    results = compare.Results(**json.loads(file.read_text()))
    assert [row["subject"] for row in results.rows] == ["firstlight Q8_0", "llama.cpp Q8_0"]
    report = compare.report(results)
    assert "| firstlight Q8_0 | 100.0 |  | 10.0 |  |" in report
    assert "| llama.cpp Q8_0 | 100.0 | failed | 10.0 | failed |" in report, "what it printed before counts"
    assert "| vLLM float32 | failed | failed | failed | failed |" in report
    assert "'llama.cpp Q8_0, round 0: status 1: out of memory'" in report
    assert "'vLLM float32, round 0: status 3: no message'" in report
    assert "* left_out: ['llamacpp', 'vllm', 'transformers']" in report


def test_a_run_that_does_not_end_has_failed(compare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "RUN_SECONDS", 2)
    rows, reason = compare._run(printing({"sequences": 1}, "import time; time.sleep(60)"))
    assert (rows, reason) == ([{"sequences": 1}], "not done after 2 s")
