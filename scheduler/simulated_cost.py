"""What the scheduler itself costs: `python -m scheduler.simulated_cost`. A command for people; no process of the server
uses it.

Decodes n sequences side by side and prints, for each sequence of a step, the microseconds of this thread's CPU that
`plan` takes, and `commit` with its events. They are means over as many steps as a block has tokens, so that each
sequence fills and registers a block once; of several such means the smallest is printed, since what other programs do
to caches only ever adds to it.
"""

import sys
import time
from statistics import fmean

from scheduler.config import SchedulerConfig
from scheduler.plan import RowLogprobs, StepPlan, StepResult, floats, ints
from scheduler.request import Request, SamplingParams
from scheduler.scheduler import Scheduler

SEQUENCES = (1, 4, 16, 64, 256, 1000)
PROMPT_TOKENS = 128
WINDOWS = 12


def _result(plan: StepPlan) -> StepResult:
    """Token 7 for each row."""
    rows = len(plan.sample.rows)
    logprobs = RowLogprobs(chosen=floats([0.0] * rows), ranks=ints([0] * rows), top_offsets=ints([0] * (rows + 1)))
    return StepResult(step_id=plan.step_id, token_ids=ints([7] * rows), sampled=logprobs, scored=RowLogprobs())


def cost(num_sequences: int, windows: int) -> tuple[float, float]:
    """Seconds of a step's `plan`, and of its `commit` and `take_events`."""
    config = SchedulerConfig(max_num_seqs=num_sequences, max_num_batched_tokens=PROMPT_TOKENS * num_sequences)
    steps = windows * config.block_size
    tokens = PROMPT_TOKENS + steps + 2
    blocks = num_sequences * (tokens // config.block_size + 2)
    scheduler = Scheduler(config, num_blocks=blocks, max_model_len=tokens)
    for seq_id in range(num_sequences):
        prompt = ints([seq_id + 10, *range(1, PROMPT_TOKENS)])
        scheduler.add(Request(seq_id=seq_id, prompt_ids=prompt, sampling=SamplingParams(max_tokens=steps + 2)), 0.0)
    while scheduler.stats().generation_tokens < num_sequences:
        _step(scheduler)
    times = [_step(scheduler) for _ in range(steps)]
    parts = [times[first : first + config.block_size] for first in range(0, steps, config.block_size)]
    plan, commit = min(((fmean(p for p, _ in part), fmean(c for _, c in part)) for part in parts), key=sum)
    return plan, commit


def _step(scheduler: Scheduler) -> tuple[float, float]:
    start = time.thread_time()
    plan = scheduler.plan(0.0)
    planned = time.thread_time()
    assert plan is not None, "nothing to plan"
    result = _result(plan)
    executed = time.thread_time()
    scheduler.commit(result, 0.0)
    events = scheduler.take_events()
    end = time.thread_time()
    assert len(events) == len(result.token_ids), "not one event for each token"
    return planned - start, end - executed


def main() -> None:
    """Print the table."""
    sys.stdout.write(f"{'sequences':>9}{'plan':>8}{'commit':>8}{'both':>8}  microseconds for each sequence of a step\n")
    for count in SEQUENCES:
        plan, commit = (seconds / count * 1e6 for seconds in cost(count, WINDOWS))
        sys.stdout.write(f"{count:9}{plan:8.2f}{commit:8.2f}{plan + commit:8.2f}\n")


if __name__ == "__main__":
    main()
