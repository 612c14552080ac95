"""Whether speculation changes any output: `python -m server.speculation_check MODEL --speculative-config JSON`, with
serve's options.

200 prompts (text that repeats, code, chat, random tokens) with parameters of every kind, greedy and sampled: penalties,
bad words, biases, min_p, min_tokens, stop tokens, a grammar, log-probabilities. Each runs alone without speculation;
then with it alone, among 32 neighbours, and in a pool of so few KV blocks that sequences are preempted. Tokens,
log-probabilities and ends must be the same. In this process, without HTTP; exit code 1 if anything differs.
"""

import argparse
import os
import random
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from model_runtime.config import RuntimeInfo
from model_runtime.executor import Executor, load_executor
from model_runtime.memory import PlanError
from model_runtime.weights.errors import CheckpointError
from scheduler.config import SchedulerConfig
from scheduler.plan import ints
from scheduler.request import OutputGrammar, Request, SamplingParams, SchedulerError, TokenEvent
from scheduler.stats import SchedulerStats
from server.config import add_arguments, resolve
from server.embedded import EmbeddedModelMissing
from server.engine import make_scheduler, read_vocabulary
from server.grammar.matchers import Matchers
from server.models import ModelNotFound, resolve_model
from server.options import OptionError
from server.prompt.tokenizer import load_tokenizer
from server.speculation_bench import copy_prompts

TEXT = Path(__file__).with_name("quality_text.txt")
GRAMMAR = OutputGrammar(source='start: "[" item (", " item)* "]"\nitem: "\\"" /[a-zA-Z ]{1,12}/ "\\"" | /[0-9]{1,4}/\n')
NEIGHBOURS = 32
PRESSED_SEQUENCES, PRESSED_TOKENS = 16, 800
"""That many sequences run in a pool for so many tokens."""

Output = tuple[object, ...]
"""Tokens, log-probabilities and end of one request."""


def prompts(model: Path, vocab_size: int, count: int) -> Iterator["array[int]"]:
    """A quarter each of repetitions, code, chat, and random tokens, in turn."""
    generator = random.Random(0)
    text = load_tokenizer(model).encode(TEXT.read_text(), add_special_tokens=False, allow_special=False)
    edits = [ids for _, ids in copy_prompts(model)]
    chats, code = edits[:4], edits[4:]
    for index in range(count):
        start, length = generator.randrange(len(text) - 40), generator.randrange(8, 40)
        kind = index % 4
        if kind == 0:
            yield text[start : start + length] * 3
        elif kind == 3:
            yield ints([generator.randrange(vocab_size) for _ in range(length)])
        else:
            ids = (code if kind == 1 else chats)[index // 4 % 4]
            yield ids[: len(ids) - generator.randrange(len(ids) // 3)]


def sampling(index: int, info: RuntimeInfo, max_tokens: int) -> SamplingParams:
    """Of ten kinds in turn; half are greedy."""
    base = SamplingParams(max_tokens=max_tokens, temperature=0.0, eos_token_ids=info.eos_token_ids, logprobs=2)
    drawn = replace(base, temperature=0.8, seed=index)
    kinds = (
        base,
        replace(drawn, top_p=0.9),
        replace(base, repetition_penalty=1.2, presence_penalty=0.5),
        replace(drawn, min_p=0.1, frequency_penalty=0.3),
        replace(base, bad_words=((100,), (28, 30), (60, 61, 62)), min_tokens=max_tokens // 2, logprobs=-1),
        replace(drawn, temperature=1.5, top_k=20, logit_bias=((28, 2.0), (30, -5.0))),
        replace(base, logit_bias=((30, 4.0),), stop_token_ids=(28, 30)),
        replace(drawn, max_tokens=1 + index % max_tokens, logprobs=0),
        replace(base, grammar=GRAMMAR),
        replace(drawn, grammar=GRAMMAR, repetition_penalty=1.1),
    )
    return kinds[index % len(kinds)]


class Engine:
    """An executor and what knows grammars."""

    def __init__(self, executor: Executor, matchers: Matchers) -> None:
        self._executor, self._matchers, self.info = executor, matchers, executor.info

    def outputs(
        self, config: SchedulerConfig, info: RuntimeInfo, groups: list[list[Request]]
    ) -> tuple[dict[int, Output], SchedulerStats]:
        """Of requests that run together with those of their group, one group after the other."""
        scheduler = make_scheduler(config, info, self._matchers)
        events: dict[int, list[TokenEvent]] = {}
        for group in groups:
            self._prepare([request for request in group if request.sampling.grammar is not None])
            for request in group:
                scheduler.add(request, 0.0)
            while (plan := scheduler.plan(0.0)) is not None:
                scheduler.commit(self._executor.execute(plan), 0.0)
                for event in scheduler.take_events():
                    events.setdefault(event.seq_id, []).append(event)
            for request in group:
                self._matchers.forget(request.seq_id)
        return {seq_id: _output(own) for seq_id, own in events.items()}, scheduler.stats()

    def _prepare(self, requests: list[Request]) -> None:
        for request in requests:
            self._matchers.prepare(request)
        while self._matchers.busy:
            time.sleep(0.001)
            assert all(error is None for _, error in self._matchers.take_ready()), "the grammar is a good one"


def _output(events: list[TokenEvent]) -> Output:
    token_ids = [token for event in events for token in event.token_ids]
    logprobs = [logprob for event in events for logprob in event.logprobs]
    return token_ids, logprobs, events[-1].finish_reason, events[-1].stop_token_id


def check(
    engine: Engine, config: SchedulerConfig, requests: list[Request]
) -> Iterator[tuple[str, int, SchedulerStats]]:
    """(How the requests ran, outputs that differ, what happened) of each way."""
    info, each = engine.info, [[request] for request in requests]
    expected, _ = engine.outputs(replace(config, max_num_seqs=1, speculative_config=None), info, each)
    few_blocks = replace(info, num_blocks=PRESSED_TOKENS // info.block_size)
    for name, running, facts, groups in (
        ("alone", 1, info, each),
        (f"among {NEIGHBOURS} others", NEIGHBOURS + 1, info, [requests]),
        ("with preemption", PRESSED_SEQUENCES, few_blocks, [requests]),
    ):
        outputs, stats = engine.outputs(replace(config, max_num_seqs=running), facts, groups)
        yield name, sum(outputs[seq_id] != output for seq_id, output in expected.items()), stats


def parser() -> argparse.ArgumentParser:
    """Flags of this command, and those of the scheduler and the runtime."""
    found = argparse.ArgumentParser(
        prog="python -m server.speculation_check", description=(sys.modules[__name__].__doc__ or "").splitlines()[0]
    )
    add_arguments(found, ("scheduler", "runtime"))
    found.set_defaults(max_model_len="1024", max_num_seqs=str(NEIGHBOURS + 1), max_queued_requests="1000")
    group = found.add_argument_group("check")
    group.add_argument("--prompts", type=int, default=200, metavar="N", help="requests (default: 200)")
    group.add_argument("--max-tokens", type=int, default=40, metavar="N", help="of an answer (default: 40)")
    return found


def run(arguments: argparse.Namespace) -> bool:
    """Print a line for each way of running; whether all outputs were the same."""
    config = resolve(arguments, os.environ)
    if config.scheduler.speculative_config is None:
        raise OptionError("--speculative-config says what to check")
    model = resolve_model(config.model).path
    executor = load_executor(model, config.runtime, config.scheduler, lambda stage, done: None)
    requests = [
        Request(seq_id=index, prompt_ids=ids, sampling=sampling(index, executor.info, arguments.max_tokens))
        for index, ids in enumerate(prompts(model, executor.info.vocab_size, arguments.prompts))
    ]
    wrong = 0
    engine = Engine(executor, Matchers(partial(read_vocabulary, model, executor.info)))
    for name, differing, stats in check(engine, config.scheduler, requests):
        drafts = f"{stats.speculation.accepted_tokens} of {stats.speculation.draft_tokens} drafts accepted"
        print(f"{name}: {differing} of {len(requests)} differ; {drafts}, {stats.preemptions} preemptions", flush=True)
        wrong += differing
    return wrong == 0


def main() -> None:
    """Check, or say in a line why not."""
    try:
        sys.exit(not run(parser().parse_args()))
    except (OptionError, ModelNotFound, EmbeddedModelMissing, CheckpointError, PlanError, SchedulerError) as error:
        sys.exit(f"speculation_check: {error}")


if __name__ == "__main__":
    main()
