"""`firstlight validate`: what its checks make of what they see, and what comes of a tiny model that takes pictures."""

import fcntl
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from loadtest.metrics import summarize
from loadtest.record import Record
from loadtest.runner import ClientCost, LevelResult
from loadtest.settings import Level
from server.cli import main
from server.tiny_vlm import write_tiny_vlm
from server.validate import document, state
from server.validate.alignment import result_of
from server.validate.asking import Answer, Refused, complete, difference, stream
from server.validate.curves import Weights, speed_checks, weights_of
from server.validate.images import Seen, distance, made_pictures
from server.validate.load import Load
from server.validate.machine import Limits
from server.validate.memory import memory_checks
from server.validate.memory_slope import Life
from server.validate.result import StageResult, checked, skipped
from server.validate.soak import growth_checks

ANSWER = Answer(
    text="one two",
    token_ids=(5, 6, 7),
    logprobs=(-0.5, -0.25, -1.0),
    best=(-0.5, -0.25, -1.0),
    finish_reason="length",
    prompt_tokens=4,
    completion_tokens=3,
    total_tokens=7,
    cached_tokens=0,
)


def test_answers_differ_in_any_bit_or_by_more_than_the_tolerance() -> None:
    assert difference(ANSWER, ANSWER, 0.0) == ""
    near = replace(ANSWER, logprobs=(-0.5, -0.25, -1.0000001))
    assert difference(ANSWER, near, 0.0) == "the log-probability of output token 2 is -1.000000, not -1.000000"
    assert difference(ANSWER, near, 0.05) == ""
    assert "not -1.0" in difference(ANSWER, replace(ANSWER, logprobs=(-0.5, -0.25, float("nan"))), 0.05)
    other = replace(ANSWER, token_ids=(5, 9, 7), logprobs=(-0.5, -0.26, -3.0))
    assert difference(ANSWER, other, 0.0) == "output token 1 is 9, not 6"
    assert difference(ANSWER, other, 0.05) == ""  # two tokens that were as likely
    assert difference(ANSWER, replace(other, logprobs=(-0.5, -0.9, -3.0)), 0.05) == "output token 1 is 9, not 6"
    assert difference(ANSWER, replace(ANSWER, token_ids=(5, 6)), 0.0) == "2 output tokens, not 3"
    assert difference(ANSWER, replace(ANSWER, finish_reason="stop"), 0.0) == "it ended with stop, not with length"


def test_an_answer_of_another_form_is_the_servers_fault() -> None:
    def served(text: str) -> httpx.Client:
        return httpx.Client(
            base_url="http://x", transport=httpx.MockTransport(lambda asked: httpx.Response(200, text=text))
        )

    with served('{"choices": []}') as http, pytest.raises(Refused, match="IndexError"):
        complete(http, {})
    event = '{"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"prompt_tokens": 1}}'
    with served(f"data: {event}\n\n") as http, pytest.raises(Refused, match="KeyError 'completion_tokens'"):
        stream(http, {})
    with served("data: {\n\n") as http, pytest.raises(Refused, match="JSONDecodeError"):
        stream(http, {})
    with served("data: [DONE]\n\n") as http, pytest.raises(Refused, match="without an answer"):
        stream(http, {})


def level(ttft: float, tpot: float) -> LevelResult:
    record = Record(scheduled=0.0, content_times=[ttft, ttft + tpot], end=ttft + tpot)
    record.output_tokens, record.has_usage = 2, True
    cost = ClientCost(cores=0.0, lag_p50_ms=0.0, lag_p99_ms=0.0, lateness_p99_ms=0.0)
    return LevelResult(
        server="s",
        level=Level(concurrency=1),
        metrics=summarize([record], {}),
        client=cost,
        server_cores=None,
        warnings=(),
        records=(record,),
    )


def test_speed_is_held_against_what_the_machine_had_left() -> None:
    weights = weights_of("llama, 100.0 M parameters in 100 MiB, KV cache in float16, compiled kernels")
    assert weights == Weights(parameters=1e8, num_bytes=100 * 2**20)
    idle, busy = Limits(read_bytes_s=20e9, flops=100e9), Limits(read_bytes_s=10e9, flops=50e9)
    fast = speed_checks(level(1.0, 0.02), level(2.0, 0.02), 500, weights, idle, busy)
    assert [(check.outcome, check.value) for check in fast] == [
        ("passed", "5.24 GB/s, 52%"),  # 100 MiB in 20 ms, of the 10 GB/s of the busier moment
        ("passed", "50 GFLOP/s, 100%"),  # 2 x 1e8 x 500 in 2 s, of 50
    ]
    slow = speed_checks(level(1.0, 0.08), level(16.0, 0.02), 500, weights, idle, busy)
    assert [check.outcome for check in slow] == ["failed", "failed"]
    assert slow[0].reason == "1.31 GB/s is 13% of what the machine gives"
    tiny = speed_checks(level(1.0, 1.0), level(1.0, 1.0), 500, Weights(parameters=1e5, num_bytes=1e5), idle, busy)
    assert [check.outcome for check in tiny] == ["skipped", "skipped"]


LOG = """\
2026 INFO memory of rank 0: weights planned 100.0 MiB, loaded 102.0 MiB; it grew by 150.0 MiB; KV pool of 100.0 MiB
2026 INFO memory: largest step planned 200.0 MiB; one of 256 tokens took 121.2 MiB, with its new keys and values
"""


@pytest.mark.parametrize(
    ("before", "after", "failed"),
    [
        ("", "", []),
        ("102.0", "105.0", ["weights take what was planned: rank 0"]),
        ("150.0", "200.0", ["loading takes no more: rank 0"]),
        ("121.2", "262.9", []),  # 200 and 10 for keys and values, a tenth more, and 32
        ("121.2", "263.1", ["a step takes what was planned"]),
    ],
)
def test_memory_is_what_was_planned(before: str, after: str, failed: list[str]) -> None:
    checks = memory_checks("KV cache 2560 tokens (0.1 GiB)", LOG.replace(before, after))
    assert [check.name for check in checks if check.outcome == "failed"] == failed and len(checks) == 3
    assert [check.outcome for check in memory_checks("", "")] == ["skipped", "skipped"]


def test_what_align_found(tmp_path: Path) -> None:
    found = {"title": "a against b", "passed": False, "verdict": "layer 0 diverges", "first": "layer 0", "suspects": []}
    (tmp_path / "align.json").write_text(json.dumps(found | {"suspects": ["the rope layout"]}))
    (check,) = result_of(tmp_path / "align.json").checks
    assert (check.outcome, check.value, check.reason) == (
        *("failed", "layer 0", "layer 0 diverges; why: the rope layout"),
    )
    (tmp_path / "align.json").write_text(json.dumps(found | {"passed": True, "first": None}))
    assert result_of(tmp_path / "align.json").checks[0].outcome == "passed"


def grown(bytes_per_request: float) -> Load:
    load = Load(1, lambda index: "", lambda index, events: "", dict, seed=0)
    noise = random.Random(0)
    samples = [(ended, int(1e8 + bytes_per_request * ended + noise.gauss(0, 3e5))) for ended in range(0, 3000, 30)]
    load.lives = {"engine": {1: Life(samples)}}
    return load


@pytest.mark.parametrize(("growth", "outcome"), [(0, "passed"), (1000, "passed"), (4000, "failed"), (60_000, "failed")])
def test_memory_that_grows_with_requests_fails(growth: int, outcome: str) -> None:
    (check,) = growth_checks(grown(growth))
    assert (check.name, check.outcome) == ("memory does not grow with requests: engine", outcome)


def test_a_load_counts_what_is_wrong_and_ends_by_itself() -> None:
    load = Load(3, lambda index: "wrong" if index == 1 else "", lambda index, events: 1 / 0, dict, seed=1, rest=0.001)
    load.run(0.2, 0.05, lambda passed: None)
    wrong = load.problems.count("wrong")
    assert load.ended > 20 and 0 < load.aborted < load.ended
    assert load.problems.count("ZeroDivisionError: division by zero") == load.aborted == len(load.problems) - wrong
    assert 0 < wrong < load.ended - load.aborted


def test_pictures_are_what_they_are_called() -> None:
    pictures = made_pictures()
    assert len(set(pictures.values())) == len(pictures) == 5
    one, other = Seen(text="a", logprobs=(-1.0,), image_tokens=4), Seen(text="a", logprobs=(-1.5,), image_tokens=4)
    assert distance(one, other) == 0.5
    assert distance(one, replace(one, text="b")) == np.inf


def test_the_verdict_names_what_failed() -> None:
    well = StageResult(checks=(checked("a", "", ""), skipped("b", "not here")))
    ill = StageResult(checks=(checked("c", "because", "the cable"),))
    assert document.verdict({"answers": well}, ()) == (True, "1 checks passed, 1 did not apply")
    assert document.verdict({"answers": well, "soak": ill}, ()) == (False, "1 of 3 checks failed (soak: c)")
    assert document.verdict({"answers": well}, ("soak",)) == (False, "not finished: soak did not run")
    assert document.verdict({"answers": StageResult(checks=(skipped("b", "x"),))}, ())[0] is False


def test_a_stage_that_passed_with_the_same_inputs_is_kept(tmp_path: Path) -> None:
    path, well = tmp_path / "state.json", StageResult(checks=(checked("a", "", ""),), facts=("f",), seconds=3.5)
    assert state.read(path) == state.State()
    ill = StageResult(checks=(checked("a", "because", ""),))
    kept = state.State(stages={name: state.Finished(inputs="x", result=one) for name, one in (("w", well), ("i", ill))})
    state.write(path, kept)
    found = state.read(path)
    assert found == kept
    assert found.passed("w", "x") == well
    assert found.passed("w", "y") is found.passed("i", "x") is found.passed("n", "x") is None
    path.write_text('{"stages": 3}')
    assert state.read(path) == state.State()


@pytest.mark.parametrize(
    "flags",
    [
        ["--only", "nothing"],
        ["--only", "soak", "--skip", "soak"],
        ["--soak-minutes", "0"],
        ["--context-minutes", "nan"],
    ],
)
def test_what_cannot_be_asked_for(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["validate", *flags])
    assert capsys.readouterr().err.startswith("firstlight: --")


def test_a_folder_is_one_validations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log of the other one, which it reads, is left as it is."""
    write_tiny_vlm(tmp_path / "tiny")
    with (tmp_path / "server.log").open("w") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        log.write("memory of rank 0")
        log.flush()
        with pytest.raises(SystemExit, match="2"):
            main(["validate", str(tmp_path / "tiny"), "--folder", str(tmp_path)])
        assert f"{tmp_path} is in use by another validation" in capsys.readouterr().err
    assert (tmp_path / "server.log").read_text() == "memory of rank 0"


KILLED = """
import sys
from pathlib import Path
from server.validate.serving import started
with started([sys.argv[1], "--no-prepare-weights", "--max-model-len", "64"], Path(sys.argv[2]), {}, 60.0) as server:
    print(server.process.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells a process that its parent was killed")
def test_a_killed_validation_leaves_no_server(tmp_path: Path) -> None:
    write_tiny_vlm(tmp_path / "tiny")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "tiny"), str(tmp_path / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as validation:
        assert validation.stdout is not None
        server = psutil.Process(int(validation.stdout.readline()))
        assert server.is_running()
        validation.kill()
    _, left = psutil.wait_procs([server], timeout=60)
    for process in left:
        process.kill()
    assert not left


def test_a_tiny_model_passes_and_is_not_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over HTTP, of a real server: single requests and pictures."""
    write_tiny_vlm(tmp_path / "tiny")
    command = ["validate", str(tmp_path / "tiny"), "--quick", "--only", "answers,images", "--folder", str(tmp_path)]
    for _ in range(2):
        with pytest.raises(SystemExit, match="0"):
            main([*command, "--max-model-len", "512"])
    shown = capsys.readouterr()
    assert shown.out.startswith("passed: ") and "as before" in shown.err
    found = json.loads((tmp_path / "report.json").read_text())
    outcomes = {check["name"]: check["outcome"] for stage in found["stages"].values() for check in stage["checks"]}
    assert found["passed"] is True and len(outcomes) == 21
    skipped_checks = {name for name, outcome in outcomes.items() if outcome != "passed"}
    assert skipped_checks == {"known answers", "answers about drawn pictures"}
    assert "<h2>Images" in (tmp_path / "report.html").read_text()
