"""Rates of the engine without HTTP: `python -m server.engine_bench MODEL`, with serve's options for the engine.

For comparisons with other engines (docs/benchmarks.md). The product's scheduler and executor in the engine's loop, in
this process; random prompts, no prefix cache, greedy, end tokens ignored. Of n sequences with P prompt tokens each:

prefill  n * P / seconds until every sequence has its first token, all of them submitted at once;
decode   n * D / seconds of D steps that give every sequence one token, after all prompts are computed;
output   n * D / (seconds of that prefill + D - 1 such steps): what clients who send such requests could be given.

They are medians over some runs, after one that does not count. With --contexts it takes the median time of a decode
step at each of these lengths instead: what a token costs as its context grows.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace

from model_runtime.executor import Executor, load_executor
from model_runtime.memory.budget import PlanError
from model_runtime.weights.errors import CheckpointError
from scheduler.plan import ints
from scheduler.request import Request, SamplingParams
from scheduler.scheduler import Scheduler
from server.config import ServeConfig, add_arguments, resolve
from server.embedded import EmbeddedModelMissing
from server.engine import make_scheduler
from server.models import ModelNotFound, resolve_model
from server.options import OptionError
from server.other_ranks import other_ranks

MAX_BATCHED_TOKENS = "512"
"""Tokens of a step unless asked for otherwise: as many as llama.cpp computes at a time (its n_ubatch). The server's
own default is less, since streams wait for a step."""
FIRST_TOKEN, END_TOKEN = 100, 40_000
"""Prompts are drawn from these ids, or from those below the end of a smaller vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of one number of sequences; fields are the keys of the JSON line."""

    sequences: int
    prefill_tok_s: float
    decode_tok_s: float
    output_tok_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Of a decode step at one context; fields are the keys of the JSON line."""

    sequences: int
    context: int
    """Keys that a timed step reads of a sequence, on average."""
    step_ms: float


class Bench:
    """An executor and fresh schedulers to drive it."""

    def __init__(self, config: ServeConfig, executor: Executor, seed: int = 0) -> None:
        self._config, self._executor, self._random = config, executor, random.Random(seed)
        self._in_flight = 0

    def rates(self, sequences: int, prompt: int, decode: int, runs: int) -> Rates:
        """Medians over `runs`, after one more to warm up."""
        prefills = [self.prefill_seconds(sequences, prompt) for _ in range(runs + 1)][1:]
        decodes = [sum(self.decode_steps(sequences, prompt, decode)[0]) for _ in range(runs + 1)][1:]
        prefill_seconds, decode_seconds = statistics.median(prefills), statistics.median(decodes)
        return Rates(
            sequences=sequences,
            prefill_tok_s=round(sequences * prompt / prefill_seconds, 1),
            decode_tok_s=round(sequences * decode / decode_seconds, 1),
            output_tok_s=round(sequences * decode / (prefill_seconds + decode_seconds * (decode - 1) / decode), 1),
        )

    def step_time(self, sequences: int, context: int, decode: int) -> StepTime:
        """Median over the `decode` steps that end near `context`."""
        prompt = context - decode - _steps_to_compute(self._config, sequences, context)
        seconds, mean = self.decode_steps(sequences, prompt, decode)
        return StepTime(sequences=sequences, context=mean, step_ms=round(statistics.median(seconds) * 1e3, 4))

    def prefill_seconds(self, sequences: int, prompt: int) -> float:
        """Until all sequences, which end with their first token, have it."""
        scheduler = self._submitted(sequences, prompt, max_tokens=1)
        start = time.perf_counter()
        while scheduler.has_work():
            self._step(scheduler)
        return time.perf_counter() - start

    def decode_steps(self, sequences: int, prompt: int, decode: int) -> tuple[list[float], int]:
        """(Seconds of each of `decode` steps that give every sequence one token, mean number of keys that they read of
        a sequence.)"""
        scheduler = self._submitted(sequences, prompt, max_tokens=self._executor.info.max_model_len)
        waiting, tokens, seconds = set(range(sequences)), 0, []
        while waiting:
            advanced = self._step(scheduler)
            waiting, tokens = waiting - advanced, tokens + len(advanced)
        for _ in range(decode):
            start, advanced = time.perf_counter(), set()
            while len(advanced) < sequences:
                found = self._step(scheduler)
                assert not advanced & found, "a sequence ended, or had no room, before it was measured"
                advanced |= found
            seconds.append(time.perf_counter() - start)
        while self._in_flight:
            self._executor.end()
            self._in_flight -= 1
        return seconds, prompt + tokens // sequences + decode // 2

    def _submitted(self, sequences: int, prompt: int, max_tokens: int) -> Scheduler:
        scheduler = make_scheduler(self._config.scheduler, self._executor.info)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        end = min(END_TOKEN, self._executor.info.vocab_size)
        for seq_id in range(sequences):
            ids = ints([self._random.randrange(min(FIRST_TOKEN, end // 2), end) for _ in range(prompt)])
            scheduler.add(Request(seq_id=seq_id, prompt_ids=ids, sampling=sampling), time.monotonic())
        return scheduler

    def _step(self, scheduler: Scheduler) -> set[int]:
        """What `EngineLoop.run` does between two looks at its socket; the sequences that were given a token."""
        most = self._executor.info.steps_in_flight
        while self._in_flight < most and (plan := scheduler.plan(time.monotonic())) is not None:
            self._executor.begin(plan)
            self._in_flight += 1
        assert self._in_flight, "sequences wait and none can run"
        self._in_flight -= 1
        scheduler.commit(self._executor.end(), time.monotonic())
        return {event.seq_id for event in scheduler.take_events() if event.token_ids}


def _counts(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a list of numbers from 1 on")
    return values


def parser() -> argparse.ArgumentParser:
    """Flags of this command, and those of the scheduler and the runtime."""
    found = argparse.ArgumentParser(
        prog="python -m server.engine_bench", description=(sys.modules[__name__].__doc__ or "").splitlines()[0]
    )
    add_arguments(found, ("scheduler", "runtime"))
    found.set_defaults(enable_prefix_caching=False, max_num_batched_tokens=MAX_BATCHED_TOKENS, prefill_share="1")
    group = found.add_argument_group("measurement")
    group.add_argument(
        "--prompt", type=int, default=128, metavar="P", help="prompt tokens of a sequence (default: 128)"
    )
    group.add_argument("--decode", type=int, default=64, metavar="D", help="decode steps that are timed (default: 64)")
    group.add_argument("--sequences", type=_counts, default=[1, 4, 16, 64], metavar="N,…", help="default: 1,4,16,64")
    group.add_argument(
        "--contexts", type=_counts, default=[], metavar="N,…", help="time decode steps that end here instead"
    )
    group.add_argument("--runs", type=int, default=3, metavar="N", help="of each measurement (default: 3)")
    group.add_argument("--json", action="store_true", help="print a JSON line for each row")
    return found


def _steps_to_compute(config: ServeConfig, sequences: int, prompt: int) -> int:
    """Steps in which all prompts are computed, and the first sequences decode already."""
    return 1 + -(-sequences * prompt // config.scheduler.max_num_batched_tokens)


def configured(arguments: argparse.Namespace) -> ServeConfig:
    """The configuration, with room for exactly what is measured where the options do not say more. Raises
    OptionError."""
    most, decode = max(arguments.sequences), arguments.decode
    arguments.max_num_seqs = str(most)
    config = resolve(arguments, os.environ)
    least = 1 + decode + _steps_to_compute(config, most, min(arguments.contexts, default=0))
    if arguments.contexts and min(arguments.contexts) < least:
        raise OptionError(f"a context of {min(arguments.contexts)} leaves no room for a prompt: {least} is the least")
    longest = arguments.prompt + decode + 2 * _steps_to_compute(config, most, arguments.prompt)
    length = config.runtime.max_model_len or max(arguments.contexts, default=longest)
    return replace(config, runtime=replace(config.runtime, max_model_len=length))


def _line(row: Rates | StepTime, facts: dict[str, object], as_json: bool) -> str:
    values = asdict(row)
    if as_json:
        return json.dumps(facts | values)
    return "  ".join(f"{name} {value:>8}" for name, value in values.items())


def main() -> None:
    """Measure, or say in a line why not."""
    try:
        measure(parser().parse_args())
    except (OptionError, ModelNotFound, EmbeddedModelMissing, CheckpointError, PlanError) as error:
        sys.exit(f"engine_bench: {error}")


def measure(arguments: argparse.Namespace) -> None:
    """Prints a line for each number of sequences, and context, when it is measured."""
    config = configured(arguments)
    with other_ranks(config) as ranks:
        path = resolve_model(config.model).path
        executor = load_executor(path, config.runtime, config.scheduler, ranks.check, ranks.place)
        _measure(arguments, config, executor)


def _measure(arguments: argparse.Namespace, config: ServeConfig, executor: Executor) -> None:
    info, bench = executor.info, Bench(config, executor)
    facts = {
        "engine": "firstlight",
        "model": config.model,
        "description": info.description,
        "weight_bytes": info.weight_bytes,
        "kv_token_bytes": info.kv_bytes // (info.num_blocks * info.block_size),
    }
    if not arguments.json:
        print(f"{info.description}; at most {info.max_num_batched_tokens} tokens a step", flush=True)
    for count in arguments.sequences:
        if not arguments.contexts:
            row = bench.rates(count, arguments.prompt, arguments.decode, arguments.runs)
            print(_line(row, facts, arguments.json), flush=True)
        for context in arguments.contexts:
            print(_line(bench.step_time(count, context, arguments.decode), facts, arguments.json), flush=True)


if __name__ == "__main__":
    main()
