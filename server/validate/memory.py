"""Memory as it was planned beside what the server took: what it writes to its log after loading, and after the first
large step, which is asked for here.
"""

import re
import time

from server.validate.answers import Asker
from server.validate.asking import complete
from server.validate.gate import Gate
from server.validate.result import Check, StageResult, checked, skipped
from server.validate.serving import LocalServer

NUMBER = r"([\d.]+) MiB"
LOADED = re.compile(rf"memory of rank (\d+): weights planned {NUMBER}, loaded {NUMBER}; it grew by {NUMBER}")
POOL = re.compile(rf"memory of rank 0: .*KV pool of {NUMBER}")
POOL_TOKENS = re.compile(r"KV cache (\d+) tokens")
STEP = re.compile(rf"memory: largest step planned {NUMBER}; one of (\d+) tokens took {NUMBER}")
SHARE, SLACK_MIB = 0.03, 1.0
"""By which weights may be more or less than was planned."""
BESIDE_MIB = 96.0
"""That a process may take beside its weights while it loads: libraries, tables of rotations, a tensor on its way."""
STEP_SHARE, STEP_SLACK_MIB = 0.10, 32.0
LOG_SECONDS = 5.0
FORMULAS = "model_runtime/memory/weights.py, memory/steps.py and memory/caches.py"


def run(gate: Gate) -> StageResult:
    """The stage. Raises Refused, httpx.HTTPError, ServerDidNotStart."""
    server = gate.server()
    asker = Asker(gate, server)
    gate.told(0.5, "the largest step")
    step = min(gate.config.scheduler.max_num_batched_tokens, asker.model.max_model_len - 2)
    prompt = (asker.prompts[0] * step)[:step]
    # A short one first: pages of the pool are large, and are taken whole.
    for length in (step // 4, step):
        complete(asker.http, asker.body(prompt[:length], f"{length} tokens", {"max_tokens": 1}))
    return StageResult(checks=tuple(memory_checks(server.started, _logged(server))))


def _logged(server: LocalServer) -> str:
    """With the line of the step, which may come a moment after the answer."""
    deadline = time.monotonic() + LOG_SECONDS
    while not STEP.search(logged := server.logged()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return logged


def memory_checks(started: str, logged: str) -> list[Check]:
    """Of each rank's weights, and of the step; from what the server printed and logged."""
    checks = [check for rank, *sizes in LOADED.findall(logged) for check in _loaded(f"rank {rank}", *map(float, sizes))]
    if not checks:
        checks.append(skipped("weights take what was planned", "the server's log does not say"))
    found, pool, tokens = STEP.search(logged), POOL.search(logged), POOL_TOKENS.search(started)
    if found is None or pool is None or tokens is None:
        return [*checks, skipped("a step takes what was planned", "no step was large enough, or nobody measures")]
    planned, taken = float(found[1]) + float(pool[1]) / float(tokens[1]) * float(found[2]), float(found[3])
    limit = planned * (1 + STEP_SHARE) + STEP_SLACK_MIB
    problem = "" if taken <= limit else f"{taken:.1f} MiB and not {planned:.1f}"
    value, most = f"{taken:.1f} MiB for {found[2]} tokens", f"at most {limit:.1f}"
    return [*checks, checked("a step takes what was planned", problem, FORMULAS, value, most)]


def _loaded(rank: str, planned: float, loaded: float, grown: float) -> list[Check]:
    off = abs(loaded - planned)
    problem = "" if off <= SHARE * planned + SLACK_MIB else f"{loaded:.1f} MiB and not {planned:.1f}"
    most = planned * (1 + SHARE) + BESIDE_MIB
    too_much = "" if grown <= most else f"the process grew by {grown:.1f} MiB"
    return [
        checked(f"weights take what was planned: {rank}", problem, FORMULAS, f"{loaded:.1f} MiB", f"{planned:.1f}"),
        checked(f"loading takes no more: {rank}", too_much, "a second copy", f"{grown:.1f} MiB", f"{most:.1f}"),
    ]
