"""`firstlight chat`: a conversation in the terminal, over HTTP like any other client."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator

import httpx
from rich.console import Console

from server.leaving import leave_by_exception
from server.local_server import ServerDidNotStart, started_server
from server.options import OptionError

DEFAULT_URL = "http://127.0.0.1:8000"
READY_TIMEOUT_SECONDS = 5.0
READ_TIMEOUT_SECONDS = 120.0
HELP = "/reset begins anew · /system TEXT instructs · /exit leaves · Ctrl-C stops"


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
        if models.status_code == httpx.codes.UNAUTHORIZED:
            raise ServerRefused(
                _error_message(models.text) + " Here: --api-key KEY, or the variable FIRSTLIGHT_API_KEY."
            )
        if models.status_code != httpx.codes.OK:
            raise ServerRefused(_error_message(models.text))
        self.model: str = models.json()["data"][0]["id"]

    def command(self, line: str) -> bool:
        """Obey a line that begins with a slash; False means leave."""
        name, _, rest = line.strip().partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset" or (name == "/system" and rest):
            self._system = rest or self._system
            self._messages.clear()
            self.note("the system message is set; " * bool(rest) + "the conversation begins anew")
        else:
            self.note(HELP if name == "/help" else f"{name} is no command here, or needs a text: {HELP}")
        return True

    def note(self, text: str) -> None:
        """A line that is no answer."""
        self._console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)

    def ask(self, text: str) -> None:
        """Send a message and print the answer as it comes."""
        self._messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {"model": self.model, "messages": system + self._messages, **self._settings}
        answer, thought, reason = "", "", None
        try:
            for delta, reasoning, reason in self._stream(body):  # noqa: B007  needed after the loop
                self._think(reasoning)
                thought += reasoning
                print("\n\n" * bool(delta and thought and not answer) + delta, end="", flush=True)
                answer += delta
        except KeyboardInterrupt:
            self._console.print(" (stopped)", style="dim", end="")
        except (ServerRefused, httpx.HTTPError) as error:
            self._console.print(f"no answer: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
            self._messages.pop()
            return
        if reason == "length":
            self._console.print(" (cut off, see --max-tokens)", style="dim", end="")
        print("\n", flush=True)
        self._messages.append({"role": "assistant", "content": answer})

    def _think(self, text: str) -> None:
        self._console.print(text, style="dim italic", end="", highlight=False, markup=False, soft_wrap=True)

    def _stream(self, body: dict[str, object]) -> Iterator[tuple[str, str, str | None]]:
        """Pieces of text and of reasoning, with the reason why the answer ended beside the last."""
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
                    delta = choice["delta"]
                    yield delta.get("content") or "", delta.get("reasoning_content") or "", choice["finish_reason"]


def _error_message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text[:300].split())


def _why_not_ready(url: str) -> str | None:
    """What keeps the server at this address from answering; None when it is ready."""
    try:
        response = httpx.get(f"{url}/health/ready", timeout=READY_TIMEOUT_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{error} (an address looks like {DEFAULT_URL})"
    return None if response.status_code == httpx.codes.OK else _error_message(response.text)


@contextlib.contextmanager
def _server(arguments: argparse.Namespace, console: Console) -> Iterator[str]:
    """The URL of a server: the one named, the one at the default address, or one started for this conversation."""
    if arguments.url is not None:
        url = arguments.url.rstrip("/").removesuffix("/v1")
        if reason := _why_not_ready(url):
            raise OptionError(f"no server is ready at {url}: {reason}")
        yield url
        return
    if arguments.model is None and _why_not_ready(DEFAULT_URL) is None:
        yield DEFAULT_URL
        return
    model = arguments.model or "embedded"
    console.print(f"starting a server with {model} ...", style="dim", highlight=False, markup=False)
    try:
        with started_server(model, "--log-level", "error") as started:
            yield started.url
    except ServerDidNotStart as error:
        raise OptionError(f"the server did not start (exit code {error.code})") from None


def _read(console: Console) -> str | None:
    try:
        return console.input("[bold]you>[/bold] ") if sys.stdin.isatty() else input()
    except (EOFError, KeyboardInterrupt):
        return None


def run(arguments: argparse.Namespace) -> int:
    """Talk until the user leaves; the exit code."""
    leave_by_exception()
    console = Console(emoji=False)
    headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    with (
        _server(arguments, console) as url,
        httpx.Client(base_url=url, headers=headers, timeout=READ_TIMEOUT_SECONDS) as client,
    ):
        try:
            conversation = Conversation(client, console, arguments)
        except (ServerRefused, httpx.HTTPError) as error:
            raise OptionError(f"the server at {url} refused: {error}") from None
        conversation.note(f"{conversation.model} at {url}\n{HELP}")
        while (line := _read(console)) is not None:
            if line.startswith("/"):
                if not conversation.command(line):
                    break
            elif line.strip():
                conversation.ask(line)
    return 0
