"""Whether speculation changes any output: `python -m server.speculation_check MODEL --speculative-config JSON`, with
serve's options.

200 prompts (text that repeats, code, chat, random tokens) with parameters of every kind, greedy and sampled: penalties,
bad words, biases, min_p, min_tokens, stop tokens, stop strings, a grammar, log-probabilities. Each runs alone without
speculation; then with it alone, among 32 neighbours, and in a pool of so few KV blocks that sequences are preempted.
Drafts are made whatever they cost. What a client is shown (text, tokens, log-probabilities, end) must be the same; of
each kind of parameters some drafts must have been accepted and some rejected, and some sequences preempted. In this
process, without HTTP; exit code 1 if anything differs or too little was tried.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from model_runtime.config import RuntimeInfo
from model_runtime.executor import Executor, load_executor
from model_runtime.memory.budget import PlanError
from model_runtime.weights.errors import CheckpointError
from scheduler.config import SchedulerConfig
from scheduler.request import Request, SchedulerError, TokenEvent, TokenLogprob
from scheduler.scheduler import Scheduler
from server.choice import ChoiceText, Prompt, TextToken
from server.config import add_arguments, resolve
from server.embedded import EmbeddedModelMissing
from server.engine import make_scheduler, read_vocabulary, to_wire
from server.grammar.matchers import Matchers
from server.models import ModelNotFound, resolve_model
from server.options import OptionError
from server.prompt.tokenizer import load_tokenizer
from server.speculation_cases import Case, make_cases

NEIGHBOURS = 32
PRESSED_SEQUENCES = 16
"""That many sequences run in a pool for the longest of all and a block more."""
WHATEVER_IT_COSTS = 1e100
"""Rows that a step takes beside its own: then every draft is worth one more."""


@dataclass(slots=True)
class Output:
    """All that a client is shown of one request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TextToken] = field(default_factory=list)
    """With their log-probabilities."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    end: tuple[object, ...] = ()


@dataclass(slots=True)
class Tried:
    """What became of drafts, by kind of parameters."""

    accepted: Counter[str]
    rejected: Counter[str]
    preemptions: int = 0

    def count(self, kind: str, event: TokenEvent) -> None:
        """All tokens of an event but the last were drafts."""
        accepted = max(0, len(event.token_ids) - 1)
        self.accepted[kind] += accepted
        self.rejected[kind] += event.num_drafts - accepted


class Engine:
    """An executor, what knows grammars, and what makes text of tokens."""

    def __init__(self, executor: Executor, model: Path, cases: list[Case]) -> None:
        self._executor, self._cases = executor, cases
        self._matchers = Matchers(partial(read_vocabulary, model, executor.info))
        self._tokenizer = load_tokenizer(model)
        self.longest = max(len(case.request.prompt_ids) + case.request.sampling.max_tokens for case in cases)

    def outputs(self, config: SchedulerConfig, info: RuntimeInfo, groups: list[range]) -> tuple[list[Output], Tried]:
        """Of the cases of a group, which run together, one group after the other."""
        scheduler = make_scheduler(config, info, self._matchers, WHATEVER_IT_COSTS)
        shown = [Output() for _ in self._cases]
        tried = Tried(Counter(), Counter())
        for group in groups:
            texts = self._begin(scheduler, group)
            while (plan := scheduler.plan(0.0)) is not None:
                scheduler.commit(self._executor.execute(plan), 0.0)
                for event in scheduler.take_events():
                    tried.count(self._cases[event.seq_id].kind, event)
                    _show(scheduler, texts[event.seq_id], event, shown[event.seq_id])
            scheduler.take_events()  # of what ended by a stop string last
            for seq_id in group:
                assert texts[seq_id].ended, "an output without an end"
                self._matchers.forget(seq_id)
        tried.preemptions = scheduler.stats().preemptions
        return shown, tried

    def _begin(self, scheduler: Scheduler, group: range) -> dict[int, ChoiceText]:
        texts = {}
        for seq_id in group:
            asked = self._cases[seq_id].request
            request = Request(seq_id=seq_id, prompt_ids=asked.prompt_ids, sampling=asked.sampling)
            if asked.sampling.grammar is not None:
                self._prepare(request)
            scheduler.add(request, 0.0)
            texts[seq_id] = ChoiceText(0, Prompt(request=asked), self._tokenizer)
        return texts

    def _prepare(self, request: Request) -> None:
        self._matchers.prepare(request)
        while self._matchers.busy:
            time.sleep(0.001)
            assert all(error is None for _, error in self._matchers.take_ready()), "the grammar is a good one"


def _show(scheduler: Scheduler, text: ChoiceText, event: TokenEvent, shown: Output) -> None:
    """Add what the event shows, as the API process does: after a stop string the sequence is aborted."""
    if text.ended:
        return
    delta = text.push(to_wire(event), [])
    shown.prompt_logprobs += event.prompt_logprobs
    if delta is None:
        return
    shown.text += delta.text
    shown.token_ids += delta.token_ids
    shown.tokens += delta.tokens
    if text.ended:
        shown.end = delta.finish_reason, delta.stop_reason, text.completion_tokens
        scheduler.abort(event.seq_id)


def check(
    engine: Engine, config: SchedulerConfig, info: RuntimeInfo, count: int
) -> Iterator[tuple[str, list[int], Tried]]:
    """(How the cases ran, those whose output differs, what was tried) of each way."""
    each, together = [range(index, index + 1) for index in range(count)], [range(count)]
    expected, _ = engine.outputs(replace(config, max_num_seqs=1, speculative_config=None), info, each)
    free = replace(info, draft_cost=0.0)
    few_blocks = replace(free, num_blocks=engine.longest // info.block_size + 2)
    for name, running, facts, groups in (
        ("alone", 1, free, each),
        (f"among {NEIGHBOURS} others", NEIGHBOURS + 1, free, together),
        ("with preemption", PRESSED_SEQUENCES, few_blocks, together),
    ):
        outputs, tried = engine.outputs(replace(config, max_num_seqs=running), facts, groups)
        yield name, [index for index in range(count) if outputs[index] != expected[index]], tried


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
    for what in ("accepted", "rejected"):
        text = f"drafts of each kind of parameters that must have been {what} (default: 20)"
        group.add_argument(f"--{what}", type=int, default=20, metavar="N", help=text)
    text = "preemptions that there must have been in the small pool (default: 5)"
    group.add_argument("--preemptions", type=int, default=5, metavar="N", help=text)
    return found


def run(arguments: argparse.Namespace) -> bool:
    """Print a line for each way of running and for each kind of parameters; whether all outputs were the same, and
    enough was tried."""
    config = resolve(arguments, os.environ)
    if config.scheduler.speculative_config is None:
        raise OptionError("--speculative-config says what to check")
    model = resolve_model(config.model).path
    executor = load_executor(model, config.runtime, config.scheduler, lambda stage, done: None)
    info = executor.info
    cases = make_cases(model, info.vocab_size, info.eos_token_ids, arguments.prompts, arguments.max_tokens)
    wrong, preemptions, accepted, rejected = 0, 0, Counter[str](), Counter[str]()
    for name, differing, tried in check(Engine(executor, model, cases), config.scheduler, info, len(cases)):
        drafts = f"{tried.accepted.total()} drafts accepted, {tried.rejected.total()} rejected"
        where = f" ({', '.join(f'{index}: {cases[index].kind}' for index in differing)})" if differing else ""
        line = f"{name}: {len(differing)} of {len(cases)} differ{where}; {drafts}, {tried.preemptions} preemptions"
        print(line, flush=True)
        wrong, preemptions = wrong + len(differing), preemptions + tried.preemptions
        accepted, rejected = accepted + tried.accepted, rejected + tried.rejected
    if too_few := preemptions < arguments.preemptions:
        print(f"too few preemptions to say anything: {preemptions}")
    return _enough(cases, accepted, rejected, arguments) and not too_few and wrong == 0


def _enough(cases: list[Case], accepted: Counter[str], rejected: Counter[str], arguments: argparse.Namespace) -> bool:
    """Whether each kind had its share of drafts, said in a line for each."""
    kinds = dict.fromkeys(case.kind for case in cases)
    for kind in kinds:
        print(f"  {kind}: {accepted[kind]} drafts accepted, {rejected[kind]} rejected")
    few = [kind for kind in kinds if accepted[kind] < arguments.accepted or rejected[kind] < arguments.rejected]
    if few:
        print(f"too few drafts to say anything: {', '.join(few)}")
    return not few


def main() -> None:
    """Check, or say in a line why not."""
    try:
        sys.exit(not run(parser().parse_args()))
    except (OptionError, ModelNotFound, EmbeddedModelMissing, CheckpointError, PlanError, SchedulerError) as error:
        sys.exit(f"speculation_check: {error}")


if __name__ == "__main__":
    main()
