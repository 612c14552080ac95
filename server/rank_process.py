"""A rank beside the engine: loads its share of the model and follows rank 0.

Started by the supervisor (`children.py`) by way of `child_entry.py`, like the engine, with which it ends.
"""

import os
import sys

from model_runtime.group import place_of
from model_runtime.memory.budget import PlanError
from model_runtime.transport import LeaderLost
from model_runtime.weights.errors import CheckpointError
from model_runtime.worker import load_follower
from server.child import EXIT_BAD_CONFIGURATION, EXIT_ORPHANED, start_child
from server.engine_process import NICENESS, die_before_the_gateway
from server.models import resolve_model
from server.pulse import Pulse


def main() -> None:
    """Run by `child_entry.py` with RUN_DIR GENERATION PIPE REGION RANK, as the engine is."""
    die_before_the_gateway()
    generation, pipe, region, rank = map(int, sys.argv[2:])
    start = start_child(f"rank {rank}")
    config = start.config
    pulse = Pulse(pipe, config.process.step_timeout)
    os.nice(NICENESS)
    place = place_of(rank, config.runtime, start.run_dir, generation, region)
    try:
        path = resolve_model(config.model).path
        follower = load_follower(path, config.runtime, config.scheduler, place, lambda: None)
        follower.run(pulse.loop)
    except (CheckpointError, PlanError) as error:
        print(f"firstlight: rank {rank}: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIGURATION)
    except LeaderLost as error:
        print(f"firstlight: rank {rank}: {error}", file=sys.stderr)
        sys.exit(EXIT_ORPHANED)
