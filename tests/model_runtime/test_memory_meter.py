"""What is logged of memory: what was planned and what it took."""

import logging
import re
from pathlib import Path

import pytest
import torch

from model_runtime.config import RuntimeConfig
from model_runtime.executor import load_executor
from model_runtime.memory import meter as memory_meter
from model_runtime.memory.meter import MemoryMeter
from scheduler.config import SchedulerConfig
from tests.checkpoints import make_checkpoint
from tests.model_runtime.test_executor import make_plan

CPU, SIZE = torch.device("cpu"), 96 * 2**20


def test_what_was_there_for_a_moment_counts() -> None:
    meter = MemoryMeter(CPU)
    meter.begin()
    before = meter.used()
    kept = torch.ones(SIZE // 4)
    assert meter.used() - before == pytest.approx(SIZE, rel=0.05)
    torch.ones(SIZE // 2).sum()
    taken, stayed = meter.end()
    assert taken == pytest.approx(2 * SIZE, rel=0.05)
    assert stayed == pytest.approx(kept.nbytes, rel=0.05)
    meter.begin()
    assert max(meter.end()) < SIZE / 20


def test_nobody_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory_meter, "STATUS", tmp_path / "status")
    monkeypatch.setattr(memory_meter, "CLEAR_REFS", tmp_path)
    meter = MemoryMeter(CPU)
    meter.begin()
    assert (meter.used(), *meter.end()) == (0, 0, 0)


def test_loading_and_the_first_large_step_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, "llama", {"vocab_size": 5000, "max_position_embeddings": 1024})
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=200, block_size=32)
    with caplog.at_level(logging.INFO, memory_meter.__name__):
        executor = load_executor(tmp_path, RuntimeConfig(), scheduler, lambda stage, fraction: None)
        info = executor.info
        for tokens in (99, 100, 200):
            executor.execute(make_plan(tokens, 1, 0.0))
    loaded, step = (record.getMessage() for record in caplog.records)
    weights = f"{info.weight_bytes / 2**20:.1f} MiB"
    assert re.fullmatch(rf"memory of rank 0: weights planned {weights}, loaded {weights}; it grew by .*", loaded)
    planned = f"{info.step_bytes / 2**20:.1f} MiB"
    assert re.fullmatch(
        rf"memory: largest step planned {planned}; one of 100 tokens took .* MiB, and .* MiB stay: .*", step
    )
