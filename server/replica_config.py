"""What the engines of several replicas are told: each has its share of the machine, and a queue as long as the
server's. Supervisor process.
"""

from dataclasses import replace

from model_runtime.host import default_budget, usable_cores
from server.config import ServeConfig


def divided(config: ServeConfig) -> ServeConfig:
    """For each of the replicas, and for the gateway. Decided once, so that an engine that is started again has the room
    that the lost one had, whatever the others have taken by then."""
    replicas, runtime, scheduler = config.process.data_parallel_size, config.runtime, config.scheduler
    if replicas == 1:
        return config
    ranks = replicas * len(runtime.own_ranks)
    return replace(
        config,
        runtime=replace(
            runtime,
            memory_budget=(runtime.memory_budget or default_budget()) // replicas,
            threads=runtime.threads or max(1, usable_cores() // ranks),
        ),
        # all may run, and as many wait as were allowed, for which one engine must have room when it is the last
        scheduler=replace(
            scheduler, max_queued_requests=scheduler.max_queued_requests + (replicas - 1) * scheduler.max_num_seqs
        ),
    )
