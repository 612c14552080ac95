"""`firstlight chat` and `firstlight doctor` as people use them: in a terminal and in a pipe."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from server.chat_command import HELP
from server.errors import Unavailable
from tests.end_to_end.conftest import Server
from tests.end_to_end.local_app import serve_app
from tests.server.fakes import TEMPLATE, FakeEngine, make_app, make_tokenizer, says

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]

FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FIRSTLIGHT_")}
    kept |= {name: os.environ[name] for name in ("FIRSTLIGHT_CACHE_DIR",) if name in os.environ}
    return kept | {"TERM": "xterm", "COLUMNS": "100"}


def _run(
    *arguments: str, lines: str = "", environment: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """A command with a pipe for its input."""
    command = [sys.executable, "-m", "server.cli", *arguments]
    given = _environment() | (environment or {})
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=90, env=given)


class Terminal:
    """A command with a terminal of its own, watched as a person would."""

    def __init__(self, *arguments: str) -> None:
        self._raw = ""
        self._read_up_to = 0
        self._side, child_side = pty.openpty()
        command = [sys.executable, "-m", "server.cli", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=child_side,
            stdout=child_side,
            stderr=child_side,
            start_new_session=True,
            env=_environment(),
        )
        os.close(child_side)

    @property
    def screen(self) -> str:
        """What was shown, without colours."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._raw)

    def type(self, text: str) -> None:
        os.write(self._side, text.encode())

    def wait_for(self, text: str, seconds: float = 30) -> None:
        """Until the text appears on the screen, after what was waited for before."""
        deadline = time.monotonic() + seconds
        while (found := self.screen.find(text, self._read_up_to)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.screen[self._read_up_to :]!r}"
            if select.select([self._side], [], [], 0.2)[0]:
                self._raw += os.read(self._side, 65_536).decode("utf-8", "replace")
        self._read_up_to = found + len(text)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        os.close(self._side)


@pytest.fixture
def terminal(server: Server) -> Iterator[Terminal]:
    made = Terminal("chat", "--url", server.url)
    yield made
    made.close()


def test_conversation_in_a_terminal(terminal: Terminal, server: Server) -> None:
    terminal.wait_for(f"{server.model} at {server.url}")
    terminal.wait_for(HELP)
    terminal.wait_for("you> ")
    terminal.type(FRANCE + "\n")
    terminal.wait_for(PARIS)
    terminal.wait_for("you> ")
    terminal.type("/help\n")
    terminal.wait_for(HELP)
    terminal.type("/sytem x\n")
    terminal.wait_for("/sytem is no command")
    terminal.type("/reset\n")
    terminal.wait_for("the conversation begins anew")
    terminal.type("/system You are a pirate.\n")
    terminal.wait_for("the system message is set")
    terminal.wait_for("you> ")
    terminal.type("\n")
    terminal.wait_for("you> ")
    terminal.type("/exit\n")
    assert terminal.process.wait(10) == 0
    assert "INFO" not in terminal.screen


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(server: Server) -> None:
    terminal = Terminal("chat", "--url", server.url, "--max-tokens", "4000", "--system", "Write long stories.")
    try:
        terminal.wait_for("you> ")
        terminal.type("Tell me a very long story about a telescope and the stars.\n")
        server.wait_for(lambda: server.progress()["running"] == 1, 10, "an answer")
        terminal.wait_for(" ")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("(stopped)")
        server.wait_for(server.is_idle, 10, "idleness after Ctrl-C")
        terminal.wait_for("you> ")
        terminal.type("\x04")
        assert terminal.process.wait(10) == 0
    finally:
        terminal.close()


def test_pipe(server: Server) -> None:
    result = _run("chat", "--url", server.url + "/v1/", "--max-tokens", "4", lines=f"{FRANCE}\n/reset\n{FRANCE}\n")
    assert result.returncode == 0
    assert result.stderr == ""
    assert result.stdout.count("The capital of France (cut off, see --max-tokens)") == 2


def test_reasoning_is_shown_before_the_answer() -> None:
    thinking = make_tokenizer(template=TEMPLATE + "{# </think> #}")
    engine = FakeEngine(script=says("<think>\nhm\n</think>\n\nhello"))
    with serve_app(make_app(engine, thinking)) as url:
        result = _run("chat", "--url", url, lines="hi\nand?\n")
    assert result.stdout.count("hm\n\nhello\n") == 2
    told = thinking.decode(engine.requests[1].prompt_ids, skip_special_tokens=False)
    assert "assistant\nhello<|im_end|>" in told, "what was thought is not sent back"


def test_history_and_system_message_are_sent(server: Server) -> None:
    """The second question makes sense only after the first; a system message changes the prompt."""
    lines = f"{FRANCE}\nRepeat your last answer word for word.\n"
    plain = _run("chat", "--url", server.url, "--max-tokens", "20", lines=lines)
    assert plain.stdout.count(PARIS) == 2
    before = server.metrics()["prompt_tokens_total"]
    _run("chat", "--url", server.url, "--max-tokens", "1", "--system", "word " * 300, lines="hi\n")
    assert server.metrics()["prompt_tokens_total"] - before > 300


def test_refused_question_leaves_the_conversation_usable(server: Server) -> None:
    result = _run("chat", "--url", server.url, lines=f"{'word ' * 10_000}\n{FRANCE}\n")
    assert "no answer: This model's maximum context length is 8192 tokens." in result.stdout
    assert PARIS in result.stdout
    assert result.returncode == 0


def test_no_server_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for address in (url, "nonsense", "http://"):
        result = _run("chat", "--url", address)
        assert result.returncode == 2
        assert f"firstlight: no server is ready at {address.rstrip('/')}" in result.stderr
        assert result.stderr.endswith(" (an address looks like http://127.0.0.1:8000)\n")
        assert "Traceback" not in result.stderr
        assert result.stdout == ""


def test_a_server_that_is_not_ready_says_why() -> None:
    with serve_app(make_app(FakeEngine(unready=Unavailable("the model is loading")))) as url:
        result = _run("chat", "--url", url)
    assert result.stderr == f"firstlight: no server is ready at {url}: the model is loading\n"


def test_wrong_key_and_right_key() -> None:
    with serve_app(make_app(FakeEngine(script=says("hello")), api_key=("sk-good",))) as url:
        for flags in ([], ["--api-key", "sk-wrong"]):
            refused = _run("chat", "--url", url, *flags)
            assert refused.returncode == 2
            assert "API key" in refused.stderr
            assert refused.stderr.endswith(" Here: --api-key KEY, or the variable FIRSTLIGHT_API_KEY.\n")
            assert "Traceback" not in refused.stderr
        for flags, environment in ((["--api-key", "sk-good"], {}), ([], {"FIRSTLIGHT_API_KEY": "sk-good"})):
            answered = _run("chat", "--url", url, *flags, lines="hi\n", environment=environment)
            assert answered.returncode == 0, answered.stderr
            assert "hello" in answered.stdout


def test_server_of_its_own_ends_with_it() -> None:
    terminal = Terminal("chat", "embedded")
    try:
        terminal.wait_for("starting a server with embedded")
        terminal.wait_for("you> ", 60)
        family = psutil.Process(terminal.process.pid).children(recursive=True)
        assert len(family) >= 3
        terminal.type(FRANCE + "\n")
        terminal.wait_for(PARIS)
        terminal.process.send_signal(signal.SIGHUP)
        assert terminal.process.wait(20) == 128 + signal.SIGHUP
        _, alive = psutil.wait_procs(family, timeout=10)
        assert alive == []
    finally:
        terminal.close()


def test_model_that_does_not_exist() -> None:
    result = _run("chat", "/nowhere/at/all")
    assert result.returncode == 2
    assert "neither a folder" in result.stderr
    assert "the server did not start" in result.stderr
    assert "Traceback" not in result.stderr


def test_doctor() -> None:
    table = _run("doctor")
    assert table.returncode == 0, table.stdout
    findings = json.loads(_run("doctor", "--json").stdout)
    assert {"Python", "libraries", "memory", "devices", "CPU kernels", "embedded model"} <= {
        finding["subject"] for finding in findings
    }
    for finding in findings:
        assert finding["state"] in ("ok", "warning")
        assert finding["detail"]
        assert finding["subject"] in table.stdout


def test_doctor_into_a_pipe_that_closes() -> None:
    command = [sys.executable, "-m", "server.cli", "doctor", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment())
    with contextlib.ExitStack() as stack:
        assert process.stdout is not None
        assert process.stderr is not None
        stack.enter_context(process.stderr)
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == ""
