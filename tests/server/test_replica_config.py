"""What each of several engines is told, and what does not go together with several."""

import argparse
from dataclasses import replace

import pytest

from model_runtime.config import RuntimeConfig
from scheduler.config import SchedulerConfig
from server import replica_config
from server.config import MAX_REPLICAS, ProcessConfig, ServeConfig, add_arguments, resolve
from server.options import OptionError
from server.replica_config import divided


def config(replicas: int, **runtime: int) -> ServeConfig:
    return ServeConfig(
        process=ProcessConfig(data_parallel_size=replicas),
        runtime=RuntimeConfig(**runtime),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_num_seqs=8, max_queued_requests=10),
    )


def test_one_engine_is_told_what_was_asked_for() -> None:
    assert divided(config(1)) == config(1)


@pytest.mark.parametrize(("ranks", "threads"), [(1, 4), (2, 2), (7, 1)])
def test_the_machine_is_divided(monkeypatch: pytest.MonkeyPatch, ranks: int, threads: int) -> None:
    """The budget of ranks is divided where they are loaded."""
    monkeypatch.setattr(replica_config, "usable_cores", lambda: 12)
    monkeypatch.setattr(replica_config, "default_budget", lambda: 3000)
    found = divided(config(3, tensor_parallel_size=ranks))
    assert (found.runtime.threads, found.runtime.memory_budget) == (threads, 1000)
    given = divided(config(3, threads=5, memory_budget=900))
    assert (given.runtime.threads, given.runtime.memory_budget) == (5, 300)


def test_the_last_engine_has_room_for_all() -> None:
    asked = config(3)
    found = divided(asked)
    assert found.scheduler.max_outstanding == 3 * 8 + 10
    assert replace(found.scheduler, max_queued_requests=10) == asked.scheduler


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["0"], "data_parallel_size must be from 1 to"),
        ([str(MAX_REPLICAS + 1)], "data_parallel_size must be from 1 to"),
        (["2", "--tensor-parallel-size", "2", "--nnodes", "2"], "nnodes must be 1"),
        (["2", "--device", "cuda"], "only for --device cpu"),
    ],
)
def test_what_is_refused(options: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(OptionError, match=message):
        resolve(parser.parse_args(["--data-parallel-size", *options]), {})
