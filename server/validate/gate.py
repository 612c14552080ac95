"""What the stages of a validation share: options, folder, the one server, and a place to say how far they are."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.config import EMBEDDED, ServeConfig
from server.models import ResolvedModel
from server.validate.serving import LocalServer, started
from server.validate.settings import Settings

REQUEST_SECONDS = 600.0
CLOSE = 0.05
"""By how much log-probabilities may differ where nothing promises the same bits: on a GPU, and with plain torch."""
DEVICE_BLOCK = 256
"""Tokens of a block on a GPU, whatever is set."""
LOG = "server.log"

Told = Callable[[float, str], None]
"""Given (fraction done, what is done now)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the running server says of its model."""

    name: str
    max_model_len: int


class Gate:
    """Of one validation. Its server is started when a stage first wants it."""

    def __init__(
        self,
        config: ServeConfig,
        model: ResolvedModel,
        settings: Settings,
        folder: Path,
        told: Told,
    ) -> None:
        self.config, self.effort, self.model, self.folder, self.told = config, settings.effort, model, folder, told
        self._arguments = (config.model, *settings.serve_arguments)
        self.align_arguments = (config.model, *settings.align_arguments)
        self._open = contextlib.ExitStack()
        self._server: LocalServer | None = None
        self._facts: ModelFacts | None = None

    @property
    def is_embedded(self) -> bool:
        """Whether it is the model whose answers are known."""
        return self.config.model == EMBEDDED

    @property
    def block_size(self) -> int:
        """Tokens of a block of the prefix cache."""
        runtime, asked = self.config.runtime, self.config.scheduler.block_size
        return (asked if runtime.device == "cpu" else DEVICE_BLOCK) * runtime.context_parallel_size

    def server(self) -> LocalServer:
        """The server with the options that were given. Raises ServerDidNotStart."""
        if self._server is None or not self._server.is_running():
            self.close()
            self.told(0.0, "starting the server")
            self._server = self._open.enter_context(self.other_server(()))
        return self._server

    @contextlib.contextmanager
    def other_server(self, more: Sequence[str]) -> Iterator[LocalServer]:
        """One with further options. Raises ServerDidNotStart."""
        keys = self.config.gateway.api_key
        headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        arguments = (*self._arguments, "--no-access-log", *more)
        with started(arguments, self.folder / LOG, headers, REQUEST_SECONDS) as server:
            yield server

    def close(self) -> None:
        """End the server, if there is one."""
        self._server = None
        self._open.close()

    def tolerance(self, server: LocalServer) -> float:
        """Of log-probabilities: none where compiled kernels compute, which give the same bits in any batch."""
        return 0.0 if "compiled kernels" in server.started else CLOSE

    def facts(self) -> ModelFacts:
        """Of the server with the options that were given, which is started to be asked once. Raises httpx.HTTPError,
        ServerDidNotStart."""
        if self._facts is None:
            self._facts = facts_of(self.server())
        return self._facts


def facts_of(server: LocalServer) -> ModelFacts:
    """Raises httpx.HTTPError."""
    found: dict[str, Any] = server.http.get("/v1/models").json()["data"][0]
    return ModelFacts(name=found["id"], max_model_len=found["max_model_len"])
