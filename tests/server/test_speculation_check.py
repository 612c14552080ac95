"""The check of speculation finds nothing where there is nothing to find, and finds what is there."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from model_runtime.config import RuntimeConfig
from model_runtime.executor import load_executor
from scheduler import outcome
from scheduler.config import SchedulerConfig, SpeculativeConfig
from scheduler.request import SamplingParams
from server import speculation_check
from server.generation import GenerationRequest
from server.prompt.tokenizer import load_tokenizer
from server.speculation_cases import REASONED, Case
from server.speculation_check import Engine
from tests.checkpoints import HYBRID, make_checkpoint

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "llama", {"num_hidden_layers": 1, "max_position_embeddings": 4096})
    return path


@pytest.fixture
def words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line; few prompts and answers."""
    size = ["--prompts", "16", "--max-tokens", "12", "--max-model-len", "4096", "--accepted", "0", "--rejected", "1"]
    size += ["--preemptions", "0"]
    words = ["speculation_check", str(folder), "--threads", "1", *size, "--speculative-config", NGRAM]
    monkeypatch.setattr(sys, "argv", words)
    return words


def test_equal_outputs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_of:
        speculation_check.main()
    assert exit_of.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0] for line in lines[:3]] == [
        "alone: 0 of 16 differ",
        "among 32 others: 0 of 16 differ",
        "with preemption: 0 of 16 differ",
    ]
    assert [line.split(":")[0].strip() for line in lines[3:]] == ["greedy", "top_p", "penalties", "min_p, penalty"]


def test_too_few_drafts_and_preemptions(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That nothing differs says nothing where nothing was drafted, or nobody preempted."""
    for demand, said in (("--accepted", "drafts to say anything: greedy"), ("--preemptions", "preemptions.*: [0-9]+")):
        monkeypatch.setattr(sys, "argv", [*words, "--prompts", "4", "--rejected", "0", demand, "1000000"])
        with pytest.raises(SystemExit) as exit_of:
            speculation_check.main()
        assert exit_of.value.code == 1
        said_so = re.findall(f"^too few {said}$", output := capsys.readouterr().out, re.MULTILINE)
        assert len(said_so) == output.count("too few") == 1


def test_outputs_that_differ(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every draft is taken to hold."""
    monkeypatch.setattr(outcome, "verify", lambda sampled, drafts: len(drafts))
    with pytest.raises(SystemExit) as exit_of:
        speculation_check.main()
    assert exit_of.value.code == 1
    assert "alone: 0 of 16" not in capsys.readouterr().out


@pytest.mark.parametrize(("family", "count"), [("llama", 100), ("qwen3_next", 30)])
def test_x20_json_after_reasoning_parses(tmp_path: Path, family: str, count: int) -> None:
    """With drafts that go on from the reasoning into the JSON, some right and some wrong."""
    folder, layers = tmp_path, {"num_hidden_layers": 1} if family == "llama" else HYBRID
    make_checkpoint(folder, family, layers | {"max_position_embeddings": 4096})
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=12, prompt_lookup_min=1)
    config = SchedulerConfig(max_num_seqs=33, max_num_batched_tokens=256, speculative_config=speculative)
    runtime = RuntimeConfig(prepare_weights=False, num_kv_blocks=1000, max_model_len=512, threads=1)
    executor = load_executor(folder, runtime, config, lambda stage, done: None)
    prompt = load_tokenizer(folder).encode(
        'a b.</think>{"a":1,"b":["sky","sky"]}' * 2, add_special_tokens=False, allow_special=False
    )
    cases = []
    for index in range(count):
        sampling = SamplingParams(
            max_tokens=150, temperature=1.0, seed=index, eos_token_ids=executor.info.eos_token_ids, grammar=REASONED
        )
        cases.append(Case(kind="", request=GenerationRequest(prompt_ids=prompt, sampling=sampling)))
    engine, all_at_once = Engine(executor, folder, cases), [range(count)]
    plain, _ = engine.outputs(replace(config, speculative_config=None), executor.info, all_at_once)
    outputs, tried = engine.outputs(config, executor.info, all_at_once)
    assert outputs == plain
    ended = [output.text for output in outputs if output.end[0] == "stop"]
    assert len(ended) > 0.9 * count
    for text in ended:
        assert set(json.loads(text.split("</think>")[1])) == {"a", "b"}
    assert tried.accepted.total() > count and tried.rejected.total() > count


def test_speculation_must_be_configured(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", words[:-2])
    with pytest.raises(SystemExit, match="--speculative-config says what to check"):
        speculation_check.main()
