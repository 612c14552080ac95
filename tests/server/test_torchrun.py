"""What torchrun says becomes serve's options."""

import argparse

import pytest

from server.config import add_arguments, resolve
from server.options import OptionError
from server.torchrun import torchrun_variables

TOLD = {
    "TORCHELASTIC_RUN_ID": "none",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
}


def test_machines_and_addresses_are_torchruns() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(["--tensor-parallel-size", "4"])
    runtime = resolve(arguments, torchrun_variables(TOLD)).runtime
    assert (runtime.nnodes, runtime.node_rank, runtime.master_addr, runtime.master_port) == (2, 1, "10.0.0.7", 29501)
    assert runtime.own_ranks == range(2, 4)


def test_without_torchrun_nothing_is_told() -> None:
    assert torchrun_variables({"MASTER_ADDR": "10.0.0.7"}) == {}


def test_several_processes_a_machine_are_refused() -> None:
    with pytest.raises(OptionError, match="--nproc-per-node 1"):
        torchrun_variables(TOLD | {"LOCAL_WORLD_SIZE": "2"})
