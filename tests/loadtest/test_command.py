"""The command as a user runs it: what it prints, writes, refuses, and its exit codes."""

import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest import report
from loadtest.conditions import git_revision
from loadtest.settings import Level, LoadTestError
from server import cli
from tests.loadtest.fake_server import FakeServer, running
from tests.loadtest.helpers import settings

SHORT = ("--input-tokens", "20", "--output-tokens", "4", "--warmup", "1", "--requests", "4")


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["loadtest", *words])
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


def row(table: str, name: str) -> list[str]:
    """The cells of a line of a table."""
    (line,) = [line for line in table.splitlines() if line.startswith(name)]
    return line.removeprefix(name).split()


def test_a_run_prints_a_table_and_writes_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    asked = ("--concurrency", "1,2", "--goodput", "ttft:60000", "--api-key", "secret-key", "--output", str(output))
    with running(FakeServer(ttft=0.01, gap=0.002)) as server:
        code, out, err = call(capsys, "--url", server.url, *SHORT, *asked)
    assert code == 0
    assert "token-exact; the template takes 10 tokens" in err
    assert row(out, "succeeded") == ["4", "4"] and row(out, "failed") == ["0", "0"]
    assert row(out, "met the objectives") == ["100.0%", "100.0%"]
    assert row(out, "cached input") == ["20.0%", "20.0%"]
    written = output.read_text()
    assert "secret-key" not in written
    document: dict[str, Any] = json.loads(written)
    assert document["conditions"]["git_revision"] == git_revision()
    assert document["conditions"]["settings"]["shape"]["seed"] == 0
    first, second = document["results"]
    assert (first["level"]["concurrency"], second["level"]["concurrency"]) == (1, 2)
    assert first["metrics"]["succeeded"] == len(first["records"]) == 4
    request = first["records"][0]
    assert (request["start_s"], request["input_tokens"], request["output_tokens"]) == (0, 20, 4)
    assert request["e2e_ms"] == pytest.approx(request["ttft_ms"] + sum(request["itl_ms"]), abs=30)


def test_servers_take_turns_and_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "run.json"
    with running(FakeServer(ttft=0.02, gap=0)) as quick, running(FakeServer(ttft=0.2, gap=0)) as slow:
        compared = ("--compare", f"quick={quick.url}", f"slow={slow.url}/v1", "--output", str(output))
        code, out, _ = call(capsys, *compared, *SHORT, "--concurrency", "1,2")
    assert code == 0
    results = json.loads(output.read_text())["results"]
    assert [result["server"] for result in results] == ["quick", "slow"] * 2
    titles = [line.strip() for line in out.splitlines()]
    assert titles.count("1 at a time") == titles.count("2 at a time") == 1 and out.count("/ quick") == 2
    (first, _) = [line for line in out.splitlines() if line.startswith("TTFT p50, ms")]
    *_, quick_ms, slow_ms, ratio = first.split()
    assert float(ratio.removesuffix("x")) == pytest.approx(float(slow_ms) / float(quick_ms), rel=0.05)
    assert float(ratio.removesuffix("x")) > 2


def test_what_was_finished_is_shown_when_the_user_stops_it() -> None:
    """The second level would take eight seconds."""
    with running(FakeServer(ttft=0, gap=0)) as server:
        command = [sys.executable, "-m", "server.cli", "loadtest", "--url", server.url, *SHORT]
        command += ["--request-rate", "50,0.5", "--arrival", "constant"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        for line in process.stderr:
            if "50 a second: 4 of 4" in line:
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert row(out, "succeeded") == ["4"]
    assert "stopped; what follows" in err and "Traceback" not in err


def test_failures_are_shown_and_decide_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(kind="status-429")) as server:
        code, out, _ = call(capsys, "--url", server.url, *SHORT, "--concurrency", "2")
    assert code == 1
    assert row(out, "failed") == ["4"]
    assert "server, 2 at a time: 4 x HTTP 429: too much for me" in out


def test_a_file_that_cannot_be_written_does_not_cost_the_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with running(FakeServer(ttft=0, gap=0)) as server:
        code, out, err = call(capsys, "--url", server.url, *SHORT, "--concurrency", "1", "--output", str(tmp_path))
    assert code == 1 and row(out, "succeeded") == ["4"]
    assert "Is a directory" in err and "Traceback" not in err


@pytest.mark.parametrize("name", ["curves.html", "curves.png"])
def test_a_report_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with running(FakeServer(ttft=0.01, gap=0.002)) as server:
        asked = ("--concurrency", "1,2", "--report", str(path), "--goodput", "tpot:1000")
        code, *_ = call(capsys, "--url", server.url, *SHORT, *asked)
    assert code == 0
    content = path.read_bytes()
    if name.endswith("png"):
        assert content.startswith(b"\x89PNG")
        return
    page = content.decode()
    assert page.startswith("<!doctype html>") and page.count("<svg") == 1
    assert "<td>output tokens/s</td>" in page and "2 at a time" in page and "git_revision" in page
    assert not re.search(r'(?:src|href)="http', page), "the page needs nothing else"


def test_a_report_without_matplotlib_is_refused_before_measuring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoadTestError, match="not installed"):
        report.check_available()
    code, _, err = call(capsys, "--url", "http://127.0.0.1:9", "--report", "x.png")
    assert code == 2 and "pip install 'firstlight[loadtest]'" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--url", "localhost"), "'localhost' is not an address such as http://127.0.0.1:8000"),
        (("--concurrency", "1,two"), "--concurrency 1,two: 'two' is not right; write it as in --concurrency 1,4,16"),
        (("--concurrency", "0"), "counts must be 1 or more"),
        (("--request-rate", "0"), "rates must be above 0"),
        (("--request-rate", "nan"), "rates must be above 0"),
        (("--concurrency", "1", "--request-rate", "2"), "not both"),
        (("--trace", "x", "--requests", "4"), "--trace says itself when"),
        (("--goodput", "ttft=3"), "is not NAME:MILLISECONDS, as in ttft:2000,tpot:50"),
        (("--goodput", "itl:3"), "'itl' is none of ttft, tpot, e2e"),
        (("--compare", "http://h:1"), "write each server as NAME=URL"),
        (("--compare", "a=http://h:1", "a=http://h:2"), "the same name"),
        (("--compare", "a=http://h:1", "--url", "http://h:1"), "--compare takes the place of --url"),
        (("--extra-body", "[]"), "must be a JSON object"),
        (("--extra-body", "{"), "is not JSON"),
        (("--image-size", "512"), "write it as in --image-size 512x512,1024x768"),
        (("--image-size", "0x4"), "write it as in --image-size"),
        (("--report", "x.pdf"), "must end in .html or .png"),
        (("--output", "/nowhere/at/all.json"), "there is no folder /nowhere/at"),
        (("--trace", "/nowhere"), "--trace /nowhere: No such file"),
        (("--api", "completions", "--workload", "images"), "--workload images needs --api chat"),
        (("--url", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9"),
    ],
)
def test_mistakes_are_explained(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    code, out, err = call(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("firstlight: ") and said in err and "Traceback" not in err


@pytest.mark.parametrize("words", [("--spread", "2"), ("--requests", "0"), ("--timeout", "-1"), ("--warmup", "-1")])
def test_numbers_have_bounds(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, _, err = call(capsys, *words)
    assert code == 2 and words[0] in err


def test_help_states_the_definitions(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert all(f"\n  {name} " in out for name in ("TTFT", "TPOT", "ITL", "E2E", "goodput"))


def test_defaults_measure_enough() -> None:
    made = settings()
    assert [level.concurrency for level in made.levels] == [1, 4, 16]
    assert [made.num_requests(level) for level in made.levels] == [16, 16, 64]
    assert made.num_requests(Level(rate=2.0)) == 60
    assert settings("--requests", "5").num_requests(Level(concurrency=64)) == 5
