"""The tables of docs/benchmarks are medians, ratios of medians and shares of the machine's limits."""

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
    chosen = {subject.name: subject for subject in compare._chosen(arguments, {"vllm", "transformers"})}
    command = compare._command(chosen["llama.cpp Q4_0"], arguments)
    assert command[0] == "/there/python" and command[2:] == ["models/q4_0.gguf", "128", "64", "1,2", "2"]
    ours = compare._command(chosen["firstlight int8"], arguments)
    assert ours[1:4] == ["-m", "server.engine_bench", "models/bfloat16"] and ours[-2:] == ["--quantization", "int8"]
