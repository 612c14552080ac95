"""What torchrun tells the processes that it starts, in the names of variables of serve. Called by
`server/serve_command.py`."""

from collections.abc import Mapping

from server.options import ENV_PREFIX, OptionError


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """None without torchrun. Raises OptionError where it starts several processes a machine: serve starts its own."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return {}
    if environment["LOCAL_WORLD_SIZE"] != "1":
        raise OptionError("torchrun starts one process a machine, --nproc-per-node 1; it starts the ranks")
    found = {
        "NNODES": environment["GROUP_WORLD_SIZE"],
        "NODE_RANK": environment["GROUP_RANK"],
        "MASTER_ADDR": environment["MASTER_ADDR"],
        "MASTER_PORT": str(int(environment["MASTER_PORT"]) + 1),  # torchrun itself listens on that
    }
    return {ENV_PREFIX + name: value for name, value in found.items()}
