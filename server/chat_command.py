"""`firstlight chat`: a conversation in the terminal, over HTTP like any other client."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import httpx
from rich.console import Console

from server.options import OptionError

DEFAULT_URL = "http://127.0.0.1:8000"
START_TIMEOUT_SECONDS = 120.0
READ_TIMEOUT_SECONDS = 120.0
HELP = "/reset begins anew · /system TEXT sets the system message · /exit or Ctrl-D leaves · Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("model", nargs="?", default=None, metavar="MODEL", help="model to start a server with")
    parser.add_argument("--url", default=None, help=f"a running server (default: {DEFAULT_URL} when one answers there)")
    parser.add_argument("--api-key", default=os.environ.get("FIRSTLIGHT_API_KEY"), help="key of the server, if any")
    parser.add_argument("--system", default=None, metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer in tokens (default: 512)")


class ServerRefused(Exception):
    """The server answered with an error; the message is its own."""


class Conversation:
    """The messages so far, and the server they go to."""

    def __init__(self, client: httpx.Client, console: Console, arguments: argparse.Namespace) -> None:
        self._client, self._console = client, console
        self._settings = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens, "stream": True}
        self._system: str | None = arguments.system
        self._messages: list[dict[str, str]] = []
        models = client.get("/v1/models")
        models.raise_for_status()
        self.model: str = models.json()["data"][0]["id"]

    def command(self, line: str) -> bool:
        """Obey a line that begins with a slash; False means leave."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self._messages.clear()
        elif name == "/system" and rest:
            self._system = rest
            self._messages.clear()
        else:
            self._console.print(HELP, style="dim", highlight=False)
        return True

    def ask(self, text: str) -> None:
        """Send a message and print the answer as it comes."""
        self._messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {"model": self.model, "messages": system + self._messages, **self._settings}
        answer = ""
        try:
            for delta in self._stream(body):
                answer += delta
                print(delta, end="", flush=True)
        except KeyboardInterrupt:
            self._console.print(" (stopped)", style="dim", end="")
        except (ServerRefused, httpx.HTTPError) as error:
            self._console.print(f"no answer: {error}", style="red", highlight=False)
            self._messages.pop()
            return
        print("\n", flush=True)
        self._messages.append({"role": "assistant", "content": answer})

    def _stream(self, body: dict[str, object]) -> Iterator[str]:
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                raise ServerRefused(_error_message(response.text))
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: ") or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerRefused(_error_message(data))
                for choice in chunk["choices"]:
                    yield choice["delta"].get("content") or ""


def _error_message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=1.0).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@contextlib.contextmanager
def _server(arguments: argparse.Namespace, console: Console) -> Iterator[str]:
    """The URL of a server: the one named, the one at the default address, or one started for this conversation."""
    if arguments.url is not None:
        if not _answers(arguments.url):
            raise OptionError(f"no server is ready at {arguments.url}")
        yield arguments.url.rstrip("/")
        return
    if arguments.model is None and _answers(DEFAULT_URL):
        yield DEFAULT_URL
        return
    model = arguments.model or "embedded"
    console.print(f"starting a server with {model} ...", style="dim", highlight=False)
    command = [sys.executable, "-m", "server.cli", "serve", model, "--port", "0", "--log-level", "error"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        address = None
        for line in process.stdout:
            if " is ready on " in line:
                address = line.split(" is ready on ")[1].split(" ")[0]
                break
        if address is None:
            raise OptionError(f"the server did not start (exit code {process.wait()})")
        yield address
    finally:
        process.terminate()
        process.wait()


def _read(console: Console) -> str | None:
    try:
        return console.input("[bold]you>[/bold] ") if sys.stdin.isatty() else input()
    except (EOFError, KeyboardInterrupt):
        return None


def run(arguments: argparse.Namespace) -> int:
    """Talk until the user leaves; the exit code."""
    console = Console()
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    with (
        _server(arguments, console) as url,
        httpx.Client(base_url=url, headers=headers, timeout=READ_TIMEOUT_SECONDS) as client,
    ):
        try:
            conversation = Conversation(client, console, arguments)
        except httpx.HTTPError as error:
            raise OptionError(f"the server at {url} refused: {error}") from None
        console.print(f"{conversation.model} at {url} — {HELP}", style="dim", highlight=False)
        while (line := _read(console)) is not None:
            if line.startswith("/"):
                if not conversation.command(line):
                    break
            elif line.strip():
                conversation.ask(line)
    return 0
