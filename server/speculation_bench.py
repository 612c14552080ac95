"""What speculation gains: `python -m server.speculation_bench MODEL --speculative-config JSON`, with serve's options.

Requests to edit a document or to fix a piece of code (`copy_prompts.json`), whose answers repeat most of what is there;
the first third of each answer is given, without which a small model talks about the text instead. They are answered one
by one. Or many requests at once: with --random, prompts of random tokens at a temperature at which nothing repeats;
with --misleading, texts of so few words that whatever they end with stood there before, and goes on at random. Without
and with speculation in turn, in this process, without HTTP; the answers must be the same token for token. Rates are
output tokens over the seconds after the last prompt was computed, in the median of --runs.
"""

import argparse
import json
import os
import random
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from model_runtime.executor import Executor, load_executor
from model_runtime.memory.budget import PlanError
from model_runtime.weights.errors import CheckpointError
from scheduler.config import SchedulerConfig
from scheduler.plan import ints
from scheduler.request import Request, SamplingParams, SchedulerError
from server.config import ServeConfig, add_arguments, resolve
from server.copy_prompts import copy_prompts
from server.embedded import EmbeddedModelMissing
from server.engine import make_scheduler
from server.models import ModelNotFound, resolve_model
from server.options import OptionError

RANDOM_PROMPT_TOKENS = 32
RANDOM_TEMPERATURE = 2.0
FEW_WORDS = 6
"""Token ids of a misleading text, near one another and all about as likely:"""
FEW_WORDS_BIAS, FEW_WORDS_TEMPERATURE = 1000.0, 50.0
"""the bias leaves no others, the temperature makes nothing of what the model thinks of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What one run gave."""

    token_ids: list[list[int]]
    seconds: float
    """Of the steps after the last prompt was computed, which give `tokens` in all."""
    planning: float
    """Of these in the scheduler."""
    tokens: int
    steps: int
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of output; fields are the keys of the JSON line."""

    prompts: str
    sequences: int
    plain_tok_s: float
    speculative_tok_s: float
    ratio: float
    plain_planning: float
    speculative_planning: float
    """Share of the time in the scheduler, which looks for drafts."""
    tokens_per_step: float
    """Of all sequences together, with speculation."""
    drafted: int
    accepted: int


class Bench:
    """An executor, and a scheduler for each run."""

    def __init__(self, config: ServeConfig, executor: Executor, sampling: SamplingParams) -> None:
        self._config, self._executor, self._sampling = config, executor, sampling

    def compare(self, prompts: "list[array[int]]", runs: int) -> tuple[Answers, Answers]:
        """The median of `runs` without speculation, and with it, in turn, after one more of each; all prompts at
        once."""
        speculative = self._config.scheduler
        plain = replace(speculative, speculative_config=None)
        slow, fast = [], []
        for _ in range(runs + 1):
            slow.append(self._answer(prompts, plain))
            fast.append(self._answer(prompts, speculative))
            assert slow[-1].token_ids == fast[-1].token_ids, "speculation changed an answer"
        return _median(slow[1:]), _median(fast[1:])

    def _answer(self, prompts: "list[array[int]]", config: SchedulerConfig) -> Answers:
        scheduler = make_scheduler(config, self._executor.info)
        for seq_id, prompt in enumerate(prompts):
            sampling = replace(self._sampling, seed=seq_id)
            scheduler.add(Request(seq_id=seq_id, prompt_ids=prompt, sampling=sampling), time.monotonic())
        outputs: list[list[int]] = [[] for _ in prompts]
        start, planning, tokens, steps = time.perf_counter(), 0.0, 0, 0
        while scheduler.has_work():
            if not all(outputs):
                start, planning, tokens, steps = time.perf_counter(), 0.0, 0, 0
            planning -= time.perf_counter()
            plan = scheduler.plan(time.monotonic())
            planning += time.perf_counter()
            assert plan is not None, "sequences wait and none can run"
            result = self._executor.execute(plan)
            planning -= time.perf_counter()
            scheduler.commit(result, time.monotonic())
            planning += time.perf_counter()
            steps += 1
            for event in scheduler.take_events():
                outputs[event.seq_id] += event.token_ids
                tokens += len(event.token_ids)
        speculation = scheduler.stats().speculation
        return Answers(
            token_ids=outputs,
            seconds=time.perf_counter() - start,
            planning=planning,
            tokens=tokens,
            steps=steps,
            draft_tokens=speculation.draft_tokens,
            accepted_tokens=speculation.accepted_tokens,
        )


def _median(answers: list[Answers]) -> Answers:
    return sorted(answers, key=lambda one: one.seconds)[len(answers) // 2]


def random_prompts(first: int, end: int, count: int) -> "list[array[int]]":
    """As many prompts of token ids from `first` to before `end`."""
    generator = random.Random(0)
    return [ints([generator.randrange(first, end) for _ in range(RANDOM_PROMPT_TOKENS)]) for _ in range(count)]


def parser() -> argparse.ArgumentParser:
    """Flags of this command, and those of the scheduler and the runtime."""
    found = argparse.ArgumentParser(
        prog="python -m server.speculation_bench", description=(sys.modules[__name__].__doc__ or "").splitlines()[0]
    )
    add_arguments(found, ("scheduler", "runtime"))
    found.set_defaults(enable_prefix_caching=False, prefill_share="1")
    group = found.add_argument_group("measurement")
    instead = group.add_mutually_exclusive_group()
    instead.add_argument(
        "--random", type=int, default=0, metavar="N", help="instead, N requests at once in which nothing repeats"
    )
    instead.add_argument(
        "--misleading",
        type=int,
        default=0,
        metavar="N",
        help="instead, N at once in which all repeats and goes on anew",
    )
    group.add_argument("--max-tokens", type=int, default=200, metavar="N", help="of an answer (default: 200)")
    group.add_argument("--runs", type=int, default=3, metavar="N", help="of each kind, after one more (default: 3)")
    group.add_argument("--json", action="store_true", help="print a JSON line for each row")
    return found


def _row(name: str, sequences: int, pairs: list[tuple[Answers, Answers]]) -> Row:
    """Of all prompts together."""
    seconds = [sum(pair[index].seconds for pair in pairs) for index in (0, 1)]
    planning = [sum(pair[index].planning for pair in pairs) / seconds[index] for index in (0, 1)]
    tokens = sum(plain.tokens for plain, _ in pairs)
    speculative = [answers for _, answers in pairs]
    steps = sum(answers.steps for answers in speculative)
    return Row(
        prompts=name,
        sequences=sequences,
        plain_tok_s=round(tokens / seconds[0], 1),
        speculative_tok_s=round(sum(answers.tokens for answers in speculative) / seconds[1], 1),
        ratio=round(seconds[0] / seconds[1], 3),
        plain_planning=round(planning[0], 4),
        speculative_planning=round(planning[1], 4),
        tokens_per_step=round(tokens / steps, 2),
        drafted=sum(answers.draft_tokens for answers in speculative),
        accepted=sum(answers.accepted_tokens for answers in speculative),
    )


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """A row for each prompt that is edited, and for texts, code and all of them; or one for many at once."""
    config = resolve(arguments, os.environ)
    if config.scheduler.speculative_config is None:
        raise OptionError("--speculative-config says what to measure")
    model = resolve_model(config.model).path
    executor = load_executor(model, config.runtime, config.scheduler, lambda stage, done: None)
    info, sampling = executor.info, SamplingParams(max_tokens=arguments.max_tokens, temperature=0.0)
    if count := arguments.random or arguments.misleading:
        name, first, end = "random", info.vocab_size // 2, info.vocab_size
        sampling = replace(sampling, temperature=RANDOM_TEMPERATURE)
        if arguments.misleading:
            name, end = "misleading", first + FEW_WORDS
            bias = tuple((token, FEW_WORDS_BIAS) for token in range(first, end))
            sampling = replace(sampling, temperature=FEW_WORDS_TEMPERATURE, logit_bias=bias)
        pair = Bench(config, executor, sampling).compare(random_prompts(first, end, count), arguments.runs)
        yield _row(name, count, [pair])
        return
    bench, pairs = Bench(config, executor, replace(sampling, eos_token_ids=info.eos_token_ids)), []
    for name, prompt in copy_prompts(model):
        pairs.append(bench.compare([prompt], arguments.runs))
        yield _row(name, 1, pairs[-1:])
    half = len(pairs) // 2
    yield from (_row("texts", 1, pairs[:half]), _row("code", 1, pairs[half:]), _row("all", 1, pairs))


def main() -> None:
    """Measure, or say in a line why not."""
    arguments = parser().parse_args()
    try:
        for row in measure(arguments):
            values = asdict(row)
            text = json.dumps(values) if arguments.json else "  ".join(f"{key} {values[key]}" for key in values)
            print(text, flush=True)
    except (OptionError, ModelNotFound, EmbeddedModelMissing, CheckpointError, PlanError, SchedulerError) as error:
        sys.exit(f"speculation_bench: {error}")


if __name__ == "__main__":
    main()
