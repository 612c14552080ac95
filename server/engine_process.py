"""The engine process: loads the model, tells how far it is, and runs the engine's loop.

Started by the supervisor (`children.py`) by way of `child_entry.py`: it imports torch, and then waits for its
configuration, so that a spare engine has done that much before it is needed.
"""

import contextlib
import os
import sys
from functools import partial
from pathlib import Path

import zmq

from model_runtime.executor import load_executor
from model_runtime.group import Place, place_of
from model_runtime.layout import layout_of
from model_runtime.memory.budget import PlanError
from model_runtime.weights.errors import CheckpointError
from server import wire
from server.child import EXIT_BAD_CONFIGURATION, ChildStart, socket_address, start_child
from server.engine import EngineLoop, make_scheduler, read_vocabulary
from server.engine_faults import FaultyLoop
from server.grammar.matchers import Matchers
from server.memory_guard import MemoryGuard
from server.models import resolve_model
from server.pulse import Pulse

OOM_SCORE = 500
"""Added to the process's own; the kernel takes the one with MAX_OOM_SCORE first."""
MAX_OOM_SCORE = 1000
NICENESS = 5
"""Added to the engine's priority value, so that the gateway answers promptly while every core computes."""


def _load(
    start: ChildStart, socket: "zmq.Socket[bytes]", generation: int, place: Place | None, pulse: Pulse
) -> EngineLoop:
    def progress(stage: str, fraction: float) -> None:
        socket.send(wire.encode(wire.Loading(generation, stage, fraction, start.replica)))

    config = start.config
    path = resolve_model(config.model).path
    executor = load_executor(path, config.runtime, config.scheduler, progress, place)
    matchers = Matchers(partial(read_vocabulary, path, executor.info, config.runtime.image_folder))
    scheduler = make_scheduler(config.scheduler, executor.info, matchers)
    loop = FaultyLoop if config.process.fault_hooks else EngineLoop
    memory = MemoryGuard(config.process.min_free_memory)
    return loop(socket, scheduler, executor, matchers, generation, memory, pulse.loop, start.replica)


def die_before_the_gateway() -> None:
    """When the kernel kills for want of memory, let it be this process: another one goes on with its requests. Where
    this cannot be said the kernel takes the largest, which is mostly this one too."""
    with contextlib.suppress(OSError):
        score = Path("/proc/self/oom_score_adj")
        score.write_text(str(min(MAX_OOM_SCORE, int(score.read_text()) + OOM_SCORE)))


def main() -> None:
    """Run by `child_entry.py` with RUN_DIR GENERATION PIPE REGION 0; replica and configuration on standard input. The
    pulse goes to the pipe; the region is memory that the ranks share."""
    die_before_the_gateway()
    start = start_child("engine")
    generation, pipe, region, rank = map(int, sys.argv[2:])
    pulse = Pulse(pipe, start.config.process.step_timeout)
    runtime = start.config.runtime
    is_alone = layout_of(runtime).size == 1
    place = None if is_alone else place_of(rank, runtime, start.run_dir, generation, region)
    os.nice(NICENESS)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, wire.engine_identity(generation))
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    socket.connect(socket_address(start.run_dir))
    try:
        loop = _load(start, socket, generation, place, pulse)
    except (CheckpointError, PlanError) as error:
        print(f"firstlight: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIGURATION)
    loop.run()
