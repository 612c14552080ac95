"""Whether outputs fit their schemas, and what masks cost: `python -m server.structured_bench MODEL`, with serve's
options.

Each of the schemas in `structured_schemas.json` is asked for again and again, at temperatures 0 and 1 in turn,
--sequences at a time, in this process, without HTTP; a comment makes each a schema of its own, which is compiled anew.
Outputs that end by themselves must be valid to `jsonschema` (of the extra `dev`); none, not even those that are cut at
--max-tokens, may have white space or digits at length.
"""

import argparse
import json
import os
import re
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import jsonschema

from model_runtime.executor import Executor, load_executor
from model_runtime.memory.budget import PlanError
from model_runtime.weights.errors import CheckpointError
from scheduler.masks import MaskRow
from scheduler.request import FinishReason, OutputGrammar, Request, SamplingParams, SchedulerError
from server.config import ServeConfig, add_arguments, resolve
from server.embedded import EmbeddedModelMissing
from server.engine import make_scheduler
from server.grammar.compiler import token_trie
from server.grammar.errors import GrammarError
from server.grammar.grammar import Grammar
from server.grammar.matchers import Matchers
from server.grammar.verdicts import verdict_on
from server.models import ModelNotFound, resolve_model
from server.options import OptionError
from server.prompt.template import ChatTemplate
from server.prompt.tokenizer import Tokenizer, load_tokenizer
from server.prompt.vocabulary import vocabulary_of

SCHEMAS = Path(__file__).with_name("structured_schemas.json")
MAX_PROMPT_CHARS = 100_000
TEMPERATURES = (0.0, 1.0)
STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|$)')
ENDLESS = re.compile(r"\s{20}|\d{45}")
"""Longer than anything that `server/grammar` lets through between two signs, or for a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What one request gave."""

    name: str
    schema: dict[str, object]
    temperature: float
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The last line; fields are the keys of its JSON."""

    generations: int
    ended: int
    """By themselves."""
    faulty: int
    """Each is a line before."""
    mask_us: int
    """Median time that making those of a step takes."""
    mask_share: float
    """Of the time of a step, in the median step in which every sequence has a grammar and writes."""


class _TimedMasks:
    """`TokenMasks` of `matchers`, with the seconds that those of each step took."""

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers
        self.seconds: list[float] = []

    def next_tokens(self, rows: Sequence[MaskRow]) -> "array[int]":
        start = time.perf_counter()
        masks = self._matchers.next_tokens(rows)
        self.seconds.append(time.perf_counter() - start)
        return masks


class Bench:
    """An executor with its tokenizer, and a scheduler for each batch."""

    def __init__(self, config: ServeConfig, executor: Executor, tokenizer: Tokenizer) -> None:
        self._config, self._executor, self._tokenizer = config, executor, tokenizer
        info = executor.info
        self._vocabulary = vocabulary_of(tokenizer, info.vocab_size, info.eos_token_ids)
        self._trie = token_trie(self._vocabulary)
        self._matchers = Matchers(lambda: self._vocabulary)
        self.eos_token_ids = info.eos_token_ids
        self.mask_seconds: list[float] = []
        self.shares: list[float] = []

    def grammar_of(self, schema: dict[str, object]) -> OutputGrammar:
        """Raises GrammarError."""
        verdict = verdict_on(Grammar(kind="json_schema", text=json.dumps(schema)), self._vocabulary, self._trie)
        if verdict.grammar is None:
            raise GrammarError(verdict.error)
        return verdict.grammar

    def run(self, requests: list[Request]) -> list[tuple[str, str]]:
        """(Text, finish reason) of requests that are answered at the same time, whose seq_ids count from 0."""
        masks = _TimedMasks(self._matchers)
        scheduler = make_scheduler(self._config.scheduler, self._executor.info, masks)
        for request in requests:
            self._matchers.prepare(request)
        while self._matchers.busy:
            for request, error in self._matchers.take_ready():
                assert error is None, "checked before"
                scheduler.add(request, time.monotonic())
        outputs: list[list[int]] = [[] for _ in requests]
        reasons = [""] * len(requests)
        while scheduler.has_work():
            start, masked = time.perf_counter(), len(masks.seconds)
            plan = scheduler.plan(time.monotonic())
            assert plan is not None, "sequences wait and none can run"
            scheduler.commit(self._executor.execute(plan), time.monotonic())
            if len(plan.query_lens) == len(plan.token_ids) == len(requests):
                self.shares.append(sum(masks.seconds[masked:]) / (time.perf_counter() - start))
            for event in scheduler.take_events():
                outputs[event.seq_id] += event.token_ids
                if event.finish_reason is not None:
                    reasons[event.seq_id] = event.finish_reason
                    self._matchers.forget(event.seq_id)
        self.mask_seconds += masks.seconds
        texts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
        return [*zip(texts, reasons, strict=True)]

    def prompt(self, schema: dict[str, object]) -> "array[int]":
        """Asks for JSON of the schema."""
        text = f"Write a short example of JSON that fits this schema:\n{json.dumps(schema, ensure_ascii=False)}"
        if self._tokenizer.chat_template is not None:
            template = ChatTemplate(self._tokenizer.chat_template, self._tokenizer.special_variables)
            messages: list[dict[str, object]] = [{"role": "user", "content": text}]
            text = template.render(messages, add_generation_prompt=True, variables={}, max_chars=MAX_PROMPT_CHARS)
        return self._tokenizer.encode(text, add_special_tokens=False, allow_special=True)


def generate(bench: Bench, count: int, sequences: int, max_tokens: int, closing: bool) -> Iterator[Output]:
    """`count` outputs, for the schemas in turn."""
    schemas = json.loads(SCHEMAS.read_text())
    jobs = [(schemas[index % len(schemas)], TEMPERATURES[index % len(TEMPERATURES)]) for index in range(count)]
    for first in range(0, count, sequences):
        batch = jobs[first : first + sequences]
        requests = [
            Request(
                seq_id=seq_id,
                prompt_ids=bench.prompt(entry["schema"]),
                sampling=SamplingParams(
                    max_tokens=max_tokens,
                    temperature=temperature,
                    seed=first + seq_id,
                    eos_token_ids=bench.eos_token_ids,
                    grammar=replace(
                        bench.grammar_of(entry["schema"] | {"$comment": f"output {first + seq_id}"}),
                        close_before_max_tokens=closing,
                    ),
                ),
            )
            for seq_id, (entry, temperature) in enumerate(batch)
        ]
        for (entry, temperature), (text, reason) in zip(batch, bench.run(requests), strict=True):
            yield Output(
                schema=entry["schema"], name=entry["name"], temperature=temperature, text=text, finish_reason=reason
            )


def fault(output: Output) -> str:
    """What is wrong with an output; empty when nothing is."""
    if ENDLESS.search(STRING.sub("_", output.text)):
        return "white space or digits at length"
    if output.finish_reason == FinishReason.LENGTH:
        return ""
    try:
        jsonschema.validate(json.loads(output.text), output.schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return ""


def parser() -> argparse.ArgumentParser:
    """Flags of this command, and those of the scheduler and the runtime."""
    found = argparse.ArgumentParser(
        prog="python -m server.structured_bench", description=(sys.modules[__name__].__doc__ or "").splitlines()[0]
    )
    add_arguments(found, ("scheduler", "runtime"))
    group = found.add_argument_group("measurement")
    group.add_argument("--generations", type=int, default=500, metavar="N", help="in all (default: 500)")
    group.add_argument("--sequences", type=int, default=16, metavar="N", help="at the same time (default: 16)")
    group.add_argument("--max-tokens", type=int, default=200, metavar="N", help="of an output (default: 200)")
    group.add_argument("--close-before-max-tokens", action="store_true", help="outputs are closed in time")
    return found


def measure(arguments: argparse.Namespace) -> Iterator[str]:
    """The outputs with a fault, then the row."""
    config = resolve(arguments, os.environ)
    model = resolve_model(config.model).path
    executor = load_executor(model, config.runtime, config.scheduler, lambda stage, done: None)
    bench = Bench(config, executor, load_tokenizer(model))
    ended = faulty = 0
    for output in generate(
        bench, arguments.generations, arguments.sequences, arguments.max_tokens, arguments.close_before_max_tokens
    ):
        ended += output.finish_reason == FinishReason.STOP
        if found := fault(output):
            faulty += 1
            yield f"{output.name}, temperature {output.temperature}: {found}: {output.text}"
    row = Row(
        generations=arguments.generations,
        ended=ended,
        faulty=faulty,
        mask_us=round(median(bench.mask_seconds) * 1e6),
        mask_share=round(median(bench.shares or [0.0]), 4),
    )
    yield json.dumps(asdict(row))


def main() -> None:
    """Measure, or say in a line why not."""
    try:
        for line in measure(parser().parse_args()):
            print(line, flush=True)
    except (OptionError, ModelNotFound, EmbeddedModelMissing, CheckpointError, PlanError, SchedulerError) as error:
        sys.exit(f"structured_bench: {error}")


if __name__ == "__main__":
    main()
