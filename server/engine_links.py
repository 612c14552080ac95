"""The engines of all replicas together: what of them is there, and what they have in common.

Kept by `server/client.py`; API process.
"""

from collections.abc import Iterator

from model_runtime.config import RuntimeInfo
from server import wire
from server.dispatch import Place
from server.engine_link import EngineLink
from server.engine_socket import EngineSocket
from server.errors import Overloaded, Unavailable


class EngineLinks:
    """A link for each replica, in their order."""

    def __init__(self, socket: EngineSocket, replicas: int, stall_timeout: float) -> None:
        self._links = [EngineLink(socket, replica, stall_timeout) for replica in range(replicas)]

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[EngineLink]:
        return iter(self._links)

    def __getitem__(self, replica: int) -> EngineLink:
        return self._links[replica]

    def of(self, generation: int) -> EngineLink | None:
        """The one whose engine has this generation and is there."""
        return next((link for link in self._links if link.is_there and link.generation == generation), None)

    def from_identity(self, identity: bytes) -> EngineLink | None:
        """The one whose engine has this identity and is there."""
        return next(
            (one for one in self._links if one.is_there and identity == wire.engine_identity(one.generation)), None
        )

    @property
    def info(self) -> RuntimeInfo:
        """Facts of the loaded model, alike for all. Raises Unavailable before the first engine was ready."""
        for link in self._links:
            if link.info is not None:
                return link.info
        raise Unavailable(self.unready_reason() or "the model is loading")

    @property
    def had_one(self) -> bool:
        """An engine was ready once."""
        return any(link.info is not None for link in self._links)

    @property
    def stats(self) -> tuple[wire.Stats | None, ...]:
        """The newest of each; None while there is none."""
        return tuple(link.stats for link in self._links)

    @property
    def is_one_missing(self) -> bool:
        """Not all are there."""
        return not all(link.is_there for link in self._links)

    @property
    def is_one_coming(self) -> bool:
        """Another one can be expected soon."""
        return any(link.is_coming for link in self._links)

    @property
    def places(self) -> list[Place]:
        """Those that are there."""
        return [
            Place(
                replica=link.replica,
                engine=link.generation,
                is_quiet=link.is_quiet or not link.is_attentive,
                adapts_images=link.info is not None and link.info.adapts_images,
            )
            for link in self._links
            if link.is_there
        ]

    def unready_reason(self) -> str | None:
        """Why a request would not run now, as the first replica gives it; None where one would run it."""
        reasons = [link.unready_reason() for link in self._links]
        return None if None in reasons else reasons[0]

    def require_attention(self) -> None:
        """Raises Overloaded while all that are there have much to read."""
        there = [link for link in self._links if link.is_there]
        if there and not any(link.is_attentive for link in there):
            raise Overloaded("the engine has not caught up with the requests that it was sent; try again")
