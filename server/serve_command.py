"""`firstlight serve`: run the supervisor and show people how the start goes. Supervisor process."""

import argparse
import logging
import os
import shlex
import time

import msgspec
import setproctitle
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from model_runtime.config import RuntimeInfo
from server import supervisor, wire
from server.child import LOG_FORMAT
from server.config import resolve
from server.models import resolve_model
from server.node import Node
from server.torchrun import torchrun_variables


class StartDisplay:
    """A progress bar while loading (plain lines where there is no terminal), then a command line to try."""

    def __init__(self, console: Console, model_name: str, needs_key: bool, replicas: int) -> None:
        self._console, self._model_name, self._needs_key = console, model_name, needs_key
        self._engines = f"{replicas} engines, each: " if replicas > 1 else ""
        self._url = ""
        self._started = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""

    def on_message(self, message: wire.StartReport) -> None:
        """Called by the supervisor for the reports of the API process up to the first readiness."""
        if isinstance(message, wire.Listening):
            self._url = message.url
        elif isinstance(message, wire.Loading):
            self._show_loading(message)
        else:
            self._show_ready(message.info)

    def _show_loading(self, loading: wire.Loading) -> None:
        if not self._console.is_terminal:
            if loading.stage != self._stage:
                self._console.print(f"  {loading.stage} ...", highlight=False)
            self._stage = loading.stage
            return
        if self._progress is None:
            columns = (TextColumn("  {task.description:<28}"), BarColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.start()
            self._task = self._progress.add_task(loading.stage, total=1.0)
        assert self._task is not None
        self._progress.update(self._task, description=loading.stage, completed=loading.fraction)

    def close(self) -> None:
        """Take the progress bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _show_ready(self, info: RuntimeInfo) -> None:
        self.close()
        seconds = time.monotonic() - self._started
        kv_tokens = info.num_blocks * info.block_size
        states = f"states {gib(info.state_bytes)}, " if info.has_states else ""
        self._console.print(
            f"[bold]{escape(self._model_name)}[/bold] is ready on [bold]{self._url}[/bold] after {seconds:.1f} s\n"
            f"  {self._engines}{escape(info.description)}\n"
            f"  context {info.max_model_len} tokens, KV cache {kv_tokens} tokens ({gib(info.kv_bytes)}), {states}"
            f"weights {gib(info.weight_bytes)}\n\nTry it:\n",
            highlight=False,
            soft_wrap=True,
        )
        print(curl_line(self._url, self._model_name, self._needs_key) + "\n", flush=True)


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB"


def curl_line(url: str, model: str, needs_key: bool) -> str:
    """A command line that works when pasted into a shell."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": model, "temperature": 0, "messages": [question]}
    key = "-H 'Authorization: Bearer '\"$FIRSTLIGHT_API_KEY\" " if needs_key else ""
    data = shlex.quote(msgspec.json.encode(body).decode())
    return f"curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d {data}"


def run(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; the exit code. Raises OptionError, ModelNotFound, EmbeddedModelMissing."""
    config = resolve(arguments, torchrun_variables(os.environ) | dict(os.environ))
    logging.getLogger().setLevel(config.process.log_level.upper())
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
    name = config.gateway.model_names(resolve_model(config.model).name)[0]
    console = Console(emoji=False)
    if config.runtime.node_rank > 0:
        console.print(
            f"firstlight: ranks of machine {config.runtime.node_rank} for {name}", highlight=False, markup=False
        )
        setproctitle.setproctitle("firstlight: node")
        return Node(config).run()
    console.print(f"firstlight: starting {name}", highlight=False, markup=False)
    display = StartDisplay(console, name, bool(config.gateway.api_key), config.process.data_parallel_size)
    try:
        return supervisor.serve(config, display.on_message)
    finally:
        display.close()
