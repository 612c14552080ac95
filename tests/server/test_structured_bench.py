"""Outputs of real and random weights fit their schemas, and speculation changes nothing; the benchmark finds faults."""

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model_runtime.config import RuntimeConfig
from model_runtime.executor import load_executor
from scheduler.config import SchedulerConfig, SpeculativeConfig
from scheduler.request import Request, SamplingParams
from scheduler.scheduler import Scheduler
from server import structured_bench
from server.config import ServeConfig
from server.embedded import embedded_path
from server.engine import make_scheduler
from server.grammar.errors import GrammarError
from server.prompt.tokenizer import load_tokenizer
from server.structured_bench import SCHEMAS, Bench, Output, fault, generate
from tests.checkpoints import make_checkpoint

SHORT = ("flat object", "array of objects", "pattern", "date formats", "tagged union", "reference", "recursive tree")


@pytest.fixture(scope="module")
def smollm2() -> Bench:
    scheduler = SchedulerConfig(max_num_seqs=16, enable_prefix_caching=False)
    runtime = RuntimeConfig(max_model_len=1024, num_kv_blocks=1024, memory_budget=2**31)
    executor = load_executor(embedded_path(), runtime, scheduler, lambda stage, done: None)
    return Bench(ServeConfig(scheduler=scheduler), executor, load_tokenizer(embedded_path()))


def _requests(bench: Bench, names: Iterable[str], **sampling: object) -> list[Request]:
    schemas = {entry["name"]: entry["schema"] for entry in json.loads(SCHEMAS.read_text())}
    params = SamplingParams(max_tokens=40, eos_token_ids=bench.eos_token_ids, temperature=0.0)
    return [
        Request(
            seq_id=seq_id,
            prompt_ids=bench.prompt(schemas[name]),
            sampling=replace(params, grammar=bench.grammar_of(schemas[name]), seed=seq_id, **sampling),
        )
        for seq_id, name in enumerate(names)
    ]


@pytest.mark.model
def test_smollm2_writes_what_schemas_want(smollm2: Bench) -> None:
    outputs = [*generate(smollm2, 16, sequences=16, max_tokens=24, closing=False)]
    assert [fault(output) for output in outputs] == [""] * 16
    assert {output.temperature for output in outputs} == {0.0, 1.0}
    assert sum(output.finish_reason == "stop" for output in outputs) >= 4


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_nothing(smollm2: Bench, temperature: float) -> None:
    config = smollm2._config
    drafting = SpeculativeConfig(method="ngram", num_speculative_tokens=8, prompt_lookup_min=1)
    requests = _requests(smollm2, SHORT, temperature=temperature)
    plain = smollm2.run(requests)
    smollm2._config = replace(config, scheduler=replace(config.scheduler, speculative_config=drafting))
    try:
        assert smollm2.run(requests) == plain
    finally:
        smollm2._config = config


@pytest.mark.model
def test_a_form_goes_with_every_other_parameter(smollm2: Bench) -> None:
    """Alone or among others, with bans, penalties and min_tokens, outputs are the same and have their form."""
    several = _requests(smollm2, SHORT, repetition_penalty=1.2, logit_bias=((28, 3.0),), min_tokens=20, logprobs=2)
    together = smollm2.run(several)
    alone = smollm2.run([replace(several[2], seq_id=0)])
    assert alone == [together[2]]
    schemas = {entry["name"]: entry["schema"] for entry in json.loads(SCHEMAS.read_text())}
    for name, (text, reason) in zip(SHORT, together, strict=True):
        output = Output(name=name, schema=schemas[name], temperature=0.0, text=text, finish_reason=reason)
        assert fault(output) == ""


def test_random_weights_write_what_schemas_want(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path, "llama", {"num_hidden_layers": 1, "max_position_embeddings": 2048})
    words = ["--generations", "82", "--sequences", "41", "--max-tokens", "60", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["structured_bench", str(tmp_path), "--num-kv-blocks", "4096", *words])
    structured_bench.main()
    row = json.loads(capsys.readouterr().out)
    assert (row["generations"], row["faulty"]) == (82, 0)
    assert 10 < row["ended"] < 82
    assert row["mask_us"] > 0


def test_closing_is_the_same_drafted_and_preempted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama", {"num_hidden_layers": 1, "max_position_embeddings": 2048})
    schedulers: list[Scheduler] = []

    def recorded(*arguments: Any) -> Scheduler:
        schedulers.append(make_scheduler(*arguments))
        return schedulers[-1]

    monkeypatch.setattr(structured_bench, "make_scheduler", recorded)
    drafting = SpeculativeConfig(method="ngram", num_speculative_tokens=8, prompt_lookup_min=1)
    outputs = []
    for blocks, speculation in [(512, None), (512, drafting), (110, None)]:
        scheduler = SchedulerConfig(max_num_seqs=8, enable_prefix_caching=False, speculative_config=speculation)
        runtime = RuntimeConfig(max_model_len=800, num_kv_blocks=blocks, memory_budget=2**28, threads=1)
        executor = load_executor(tmp_path, runtime, scheduler, lambda stage, done: None)
        bench = Bench(ServeConfig(scheduler=scheduler), executor, load_tokenizer(tmp_path))
        outputs.append([*generate(bench, 4, sequences=4, max_tokens=70, closing=True)])
    assert outputs[0] == outputs[1] == outputs[2]
    assert [(output.finish_reason, fault(output)) for output in outputs[0]] == [("stop", "")] * 4
    plain, drafted, preempted = (scheduler.stats() for scheduler in schedulers)
    assert drafted.speculation.draft_tokens > 0
    assert preempted.preemptions > plain.preemptions == 0


@pytest.mark.parametrize(
    ("text", "reason", "found"),
    [
        ("[1]", "stop", ""),
        ('["a"]', "stop", "'a' is not of type 'integer'"),
        ("[1", "stop", "Expecting ',' delimiter"),
        ("[1", "length", ""),
        ("[" + " " * 20, "length", "white space or digits at length"),
        ("[" + "1" * 45, "length", "white space or digits at length"),
        ('["' + "1" * 99, "length", ""),
    ],
)
def test_faults_are_found(text: str, reason: str, found: str) -> None:
    schema: dict[str, object] = {"type": "array", "items": {"type": "integer"}}
    output = Output(name="x", schema=schema, temperature=0.0, text=text, finish_reason=reason)
    assert fault(output).startswith(found)
    assert bool(fault(output)) == bool(found)


@pytest.mark.model
def test_a_schema_that_cannot_be_obeyed_is_said(smollm2: Bench) -> None:
    with pytest.raises(GrammarError, match="the keyword 'not' is not supported"):
        smollm2.grammar_of({"not": {}})


def test_there_are_forty_schemas_and_each_may_be_asked_for() -> None:
    names = [entry["name"] for entry in json.loads(SCHEMAS.read_text())]
    assert len(set(names)) == len(names) >= 40
