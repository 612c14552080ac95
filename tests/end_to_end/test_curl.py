"""Plain curl: the line that `firstlight serve` prints, streams, and what curl does that libraries do not."""

import json
import shutil
import subprocess

import pytest

from tests.end_to_end.conftest import Server

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(60),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]

JSON = ("-H", "Content-Type: application/json")
ENDLESS = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}


def _curl(*arguments: str, data: str | None = None) -> str:
    """The output; `data` goes to its standard input."""
    command = ["curl", "--silent", "--show-error", "--max-time", "40", *arguments]
    result = subprocess.run(command, input=data, capture_output=True, text=True, timeout=50)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _printed_line(server: Server) -> str:
    """The curl line of the server's own output, which follows the line that says where it listens."""
    assert server.process.stdout is not None
    while not any(line.startswith("curl ") for line in server.output):
        server.output.append(server.process.stdout.readline())
    return next(line for line in server.output if line.startswith("curl "))


def test_the_printed_line_works_when_pasted(server: Server) -> None:
    line = _printed_line(server)
    result = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=50)
    assert json.loads(result.stdout)["choices"][0]["message"]["content"] == "The capital of France is Paris."


def test_stream_arrives_as_it_is_made(server: Server) -> None:
    body = json.dumps({"model": server.model, **ENDLESS})
    command = ["curl", "-sN", "--max-time", "40", server.url + "/v1/completions", *JSON, "-d", body]
    curl = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert curl.stdout is not None
        first = curl.stdout.readline()
        assert json.loads(first.removeprefix("data: "))["object"] == "text_completion"
        assert curl.stdout.readline() == "\n"
        assert server.progress()["running"] == 1
    finally:
        curl.kill()
        curl.wait()
        curl.stdout.close()
    server.wait_for(server.is_idle, 10, "idleness after curl was killed")


def test_whole_stream(server: Server) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": server.model, "messages": question, "temperature": 0, "stream": True}
    events = _curl("-N", server.url + "/v1/chat/completions", *JSON, "-d", json.dumps(body)).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "The capital of France is Paris."


@pytest.mark.parametrize(
    "flags", [["--http2"], ["--http1.0"], ["-H", "Transfer-Encoding: chunked"], ["-H", "Expect: 100-continue"]]
)
def test_body_arrives_however_it_is_sent(server: Server, flags: list[str]) -> None:
    """--http2 offers h2c, as Java's client does by default: the offer is passed over, the body is not."""
    body = {"model": server.model, "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
    answer = json.loads(_curl(*flags, server.url + "/v1/completions", *JSON, "-d", "@-", data=json.dumps(body)))
    assert answer["choices"][0]["text"] == " Paris"


def test_forgotten_content_type_is_named(server: Server) -> None:
    answer = json.loads(_curl(server.url + "/v1/completions", "-d", "{}"))
    assert "application/json" in answer["error"]["message"]


def test_large_body_is_refused_after_expect(server: Server) -> None:
    body = json.dumps({"model": server.model, "prompt": "word " * 600_000})
    answer = json.loads(_curl(server.url + "/v1/completions", *JSON, "-d", "@-", data=body))
    assert answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/v1/models"])
def test_head(server: Server, path: str) -> None:
    status, *headers = _curl("--head", server.url + path).splitlines()
    assert status.split()[1] == "200"
    assert "content-type: application/json" in headers


def test_options_says_what_is_allowed(server: Server) -> None:
    head, _, body = _curl("-i", "-X", "OPTIONS", server.url + "/v1/chat/completions").partition("\n\n")
    assert "405" in head.splitlines()[0]
    assert "allow: POST" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
