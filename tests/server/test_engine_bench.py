"""The engine benchmark gives every sequence what it says it does, and takes serve's options."""

import json
import sys
from pathlib import Path

import pytest

from model_runtime.executor import load_executor
from server import engine_bench
from server.engine_bench import Bench, configured, parser
from server.options import OptionError
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "llama", {"num_hidden_layers": 1})
    return path


def test_options_are_those_of_serve_with_defaults_of_its_own() -> None:
    config = configured(
        parser().parse_args(["embedded", "--threads", "2", "--sequences", "1,5", "--kernels", "reference"])
    )
    assert (config.runtime.threads, config.runtime.kernels) == (2, "reference")
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (5, 512)
    assert not config.scheduler.enable_prefix_caching
    assert configured(parser().parse_args(["--contexts", "128,4096"])).runtime.max_model_len == 4096
    with pytest.raises(OptionError, match="a context of 66 leaves no room for a prompt: 67 is the least"):
        configured(parser().parse_args(["--contexts", "66,512", "--sequences", "1"]))
    assert configured(parser().parse_args(["--max-num-batched-tokens", "64"])).scheduler.max_num_batched_tokens == 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-model"], "no-such-model is neither"),
        (["--contexts", "8"], "leaves no room for a prompt"),
        (["--max-model-len", "99999"], "max_model_len 99999 exceeds"),
    ],
)
def test_what_cannot_be_measured_is_said(
    folder: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = [] if words[0] == "no-such-model" else [str(folder)]
    monkeypatch.setattr(sys, "argv", ["engine_bench", *model, *words])
    with pytest.raises(SystemExit, match=message):
        engine_bench.main()


def test_every_sequence_is_given_a_token_in_every_timed_step(folder: Path) -> None:
    flags = ["--prompt", "9", "--decode", "5", "--sequences", "3", "--max-num-batched-tokens", "8", "--threads", "1"]
    config = configured(parser().parse_args([str(folder), *flags]))
    executor = load_executor(folder, config.runtime, config.scheduler, lambda stage, done: None)
    bench = Bench(config, executor)
    seconds, context = bench.decode_steps(3, 9, 5)
    assert len(seconds) == 5
    # 27 prompt tokens, 8 a step: a first token each in steps 2, 3 and 4, then one more in each later step
    assert context == 9 + (3 + 2 + 1) // 3 + 5 // 2
    rates = bench.rates(3, 9, 5, runs=1)
    assert rates.sequences == 3 and rates.prefill_tok_s > 0
    expected = 3 * 5 / (3 * 9 / rates.prefill_tok_s + 4 * 3 / rates.decode_tok_s)
    assert rates.output_tok_s == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ([], {"sequences", "prefill_tok_s", "decode_tok_s", "output_tok_s"}),
        (["--contexts", "8,16"], {"sequences", "context", "step_ms"}),
    ],
)
def test_prints_a_json_line_for_each_row(
    folder: Path, flags: list[str], keys: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        str(folder),
        "--prompt",
        "4",
        "--decode",
        "2",
        "--sequences",
        "1,2",
        "--runs",
        "1",
        "--threads",
        "1",
        "--json",
    ]
    monkeypatch.setattr(sys, "argv", ["engine_bench", *words, *flags])
    engine_bench.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["sequences"] for row in rows] == ([1, 1, 2, 2] if flags else [1, 2])
    facts = {"engine", "model", "description", "weight_bytes", "kv_token_bytes"}
    assert all(set(row) == facts | keys for row in rows)
    assert rows[0]["engine"] == "firstlight" and rows[0]["kv_token_bytes"] > 0
