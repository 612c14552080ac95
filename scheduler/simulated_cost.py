"""What the scheduler itself costs: `python -m scheduler.simulated_cost`. A command for people; no process of the server
uses it.

Decodes n sequences side by side and prints, for each sequence of a step, the microseconds of this thread's CPU that
`plan` takes, and `commit` with its events. They are means over as many steps as a block has tokens, so that each
sequence fills and registers a block once; of several such means the smallest is printed, since what other programs do
to caches only ever adds to it. Then both together with speculation by prompt lookup, which finds nothing in a text of
unlike tokens, and 16 places to compare in one of few words; no guess is worth a row.
"""

import sys
import time
from collections.abc import Iterator
from itertools import count, islice, repeat
from random import Random
from statistics import fmean

from scheduler.config import SchedulerConfig, SpeculativeConfig
from scheduler.plan import RowLogprobs, StepPlan, StepResult, floats, ints
from scheduler.request import Request, SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.speculation import StepCost

SEQUENCES = (1, 4, 16, 64, 256, 1000)
PROMPT_TOKENS = 128
WINDOWS = 12
FEW_WORDS = 12
LOOKUP = SpeculativeConfig(method="ngram", num_speculative_tokens=12)


def same_words() -> Iterator[int]:
    """A text of one word."""
    return repeat(7)


def unlike_words() -> Iterator[int]:
    """In which no token comes twice."""
    return count(10_000)


def few_words() -> Iterator[int]:
    """Of as few as a misleading text has."""
    generator = Random(0)
    return (generator.randrange(FEW_WORDS) for _ in count())


def _result(plan: StepPlan, words: Iterator[int]) -> StepResult:
    """The next word for each row."""
    rows = len(plan.sample.rows)
    logprobs = RowLogprobs(chosen=floats([0.0] * rows), ranks=ints([0] * rows), top_offsets=ints([0] * (rows + 1)))
    return StepResult(
        step_id=plan.step_id, token_ids=ints([*islice(words, rows)]), sampled=logprobs, scored=RowLogprobs()
    )


def cost(
    num_sequences: int, windows: int, words: Iterator[int], speculative: SpeculativeConfig | None = None
) -> tuple[float, float]:
    """Seconds of a step's `plan`, and of its `commit` and `take_events`, where sequences write `words` in turn."""
    config = SchedulerConfig(
        max_num_seqs=num_sequences,
        max_num_batched_tokens=PROMPT_TOKENS * num_sequences,
        speculative_config=speculative,
    )
    steps = windows * config.block_size
    tokens = PROMPT_TOKENS + steps + 2
    blocks = num_sequences * (tokens // config.block_size + 2)
    scheduler = Scheduler(config, num_blocks=blocks, max_model_len=tokens, step_cost=StepCost(fixed_rows=0.0))
    for seq_id in range(num_sequences):
        prompt = ints([seq_id + 10, *range(1, PROMPT_TOKENS)])
        scheduler.add(Request(seq_id=seq_id, prompt_ids=prompt, sampling=SamplingParams(max_tokens=steps + 2)), 0.0)
    while scheduler.stats().generation_tokens < num_sequences:
        _step(scheduler, words)
    times = [_step(scheduler, words) for _ in range(steps)]
    parts = [times[first : first + config.block_size] for first in range(0, steps, config.block_size)]
    plan, commit = min(((fmean(p for p, _ in part), fmean(c for _, c in part)) for part in parts), key=sum)
    return plan, commit


def _step(scheduler: Scheduler, words: Iterator[int]) -> tuple[float, float]:
    start = time.thread_time()
    plan = scheduler.plan(0.0)
    planned = time.thread_time()
    assert plan is not None, "nothing to plan"
    result = _result(plan, words)
    executed = time.thread_time()
    scheduler.commit(result, 0.0)
    events = scheduler.take_events()
    end = time.thread_time()
    assert len(events) == len(result.token_ids), "not one event for each token"
    return planned - start, end - executed


def main() -> None:
    """Print the table."""
    heads = ("plan", "commit", "both", "unlike", "few words")
    titles = "".join(f"{head:>10}" for head in heads)
    sys.stdout.write(f"{'sequences':>9}{titles}  microseconds for each sequence of a step\n")
    for number in SEQUENCES:
        plan, commit = cost(number, WINDOWS, same_words())
        guessing = [sum(cost(number, WINDOWS, words, LOOKUP)) for words in (unlike_words(), few_words())]
        figures = "".join(f"{seconds / number * 1e6:10.2f}" for seconds in (plan, commit, plan + commit, *guessing))
        sys.stdout.write(f"{number:9}{figures}\n")


if __name__ == "__main__":
    main()
