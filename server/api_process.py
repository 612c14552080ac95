"""The API process: the gateway's application on a uvicorn server, joined to the engine's socket.

Started by the supervisor. The durable part of the server: it goes on answering while the engine is restarted. Torch is
never imported here.
"""

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial

import uvicorn
import uvloop
import zmq.asyncio

from model_runtime.pooling_config import read_pooling
from model_runtime.weights.errors import CheckpointError
from server.app import create_app
from server.child import EXIT_BAD_CONFIGURATION, ChildStart, socket_address, start_child
from server.client import EngineClient
from server.config import ProcessConfig
from server.engine_socket import bind
from server.faults import FaultyClient
from server.grammar.checker import ProcessChecker
from server.grammar.vocabulary import Vocabulary
from server.http_protocol import bounded_protocol
from server.images import ImagePipeline
from server.memory_guard import CHECK_SECONDS, MemoryGuard
from server.models import resolve_model
from server.prompt.image_source import load_tokenizer_for, read_images
from server.prompt.tokenizer import Tokenizer
from server.prompt.vocabulary import vocabulary_of
from server.responses.store import ResponseStore

KEEP_ALIVE_SECONDS = 75
LISTEN_BACKLOG = 2048
ACCEPTS_PER_PASS = 8
"""uvloop accepts one connection per descriptor in each pass of its loop: too few for a burst."""
DRAIN_POLL_SECONDS = 0.05


def _listen(config: ProcessConfig) -> socket.socket:
    """The bound socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((config.host, config.port))
    listener.listen(LISTEN_BACKLOG)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _vocabulary(tokenizer: Tokenizer, client: EngineClient) -> Vocabulary:
    """Raises Unavailable before the first engine was ready, GrammarError for a model that cannot end an output."""
    return vocabulary_of(tokenizer, client.info.vocab_size, client.info.eos_token_ids)


class _Server(uvicorn.Server):
    """Whatever makes the process end, nobody's answer breaks off without a word."""

    def __init__(self, config: uvicorn.Config, client: EngineClient) -> None:
        super().__init__(config)
        self._client = client

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: signals are the supervisor's business (see `child.start_child`)."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called when the server stops listening."""
        self._client.shut_down()
        await super().shutdown(sockets)


class ApiProcess:
    """The objects of the process, made in its event loop."""

    def __init__(self, start: ChildStart, listener: socket.socket) -> None:
        config = start.config
        self._memory = MemoryGuard(config.process.min_free_memory)
        client = FaultyClient if config.process.fault_hooks else EngineClient
        self._client = client(
            bind(zmq.asyncio.Context(), socket_address(start.run_dir)),
            config.scheduler,
            replicas=config.process.data_parallel_size,
            max_unread_events=config.gateway.max_unread_events,
            max_queued_image_bytes=config.images.max_queued_image_bytes,
            stall_timeout=config.process.stall_timeout,
            memory=self._memory,
            url=_url(listener),
            on_drain=self._start_drain,
        )
        model = resolve_model(config.model)
        image_folder = config.runtime.image_folder
        preprocessor = read_images(image_folder or model.path)
        tokenizer = load_tokenizer_for(model.path, preprocessor, image_folder)
        self._images = None if preprocessor is None else ImagePipeline(preprocessor, config.images)
        self._grammars = ProcessChecker(partial(_vocabulary, tokenizer, self._client))
        pooling = read_pooling(model.path, config.gateway.pooling)
        app = create_app(config.gateway, self._client, tokenizer, model.name, self._grammars, self._images, pooling)
        self._responses: ResponseStore = app.state.gateway.responses
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=bounded_protocol(config.gateway.max_head_bytes, config.gateway.body_timeout),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
            ),
            self._client,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def _start_drain(self, timeout: float) -> None:
        self._tasks.add(asyncio.get_running_loop().create_task(self._drain(timeout)))

    async def _drain(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self._client.idle and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        self._server.should_exit = True

    async def run(self) -> None:
        """Serve until drained. A fault of what runs beside it ends the process."""
        work = (self._client.run(), self._client.report_health(), self._watch_memory())
        tasks = [asyncio.get_running_loop().create_task(part) for part in work]
        for task in tasks:
            task.add_done_callback(self._stop)
        more = [self._listener.dup() for _ in range(ACCEPTS_PER_PASS - 1)]
        await self._server.serve(sockets=[self._listener, *more])
        for task in tasks:
            task.remove_done_callback(self._stop)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._grammars.aclose()
        if self._images is not None:
            await self._images.aclose()

    async def _watch_memory(self) -> None:
        while True:
            if self._memory.look() and self._memory.is_scarce:
                self._responses.relieve()
                if self._images is not None:
                    self._images.forget_unused()
            await asyncio.sleep(CHECK_SECONDS)

    def _stop(self, task: "asyncio.Task[None]") -> None:
        self._server.should_exit = True


async def _main(start: ChildStart, listener: socket.socket) -> None:
    await ApiProcess(start, listener).run()


def main() -> None:
    """Run by `child_entry.py` with RUN_DIR, configuration on standard input."""
    start = start_child("api")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    process = start.config.process
    try:
        listener = _listen(process)
    except OSError as error:
        print(f"firstlight: cannot listen on {process.host} port {process.port}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIGURATION)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_main(start, listener))
    except CheckpointError as error:
        print(f"firstlight: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_CONFIGURATION)
