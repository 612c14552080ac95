"""The vectors of one request: what the engine pooled is awaited, divided, cut and normalised.

Made by `server/api/embeddings.py`; API process. A sum is only added up where it must be, in the engine; all that makes
a vector of it is here.
"""

import numpy as np
from numpy.typing import NDArray

from model_runtime.pooling_config import PoolingRecipe
from server.errors import InternalError, from_engine
from server.generation import GenerationRequest, RequestStream
from server.metrics import RequestMeter
from server.stream import end_reason

LEAST_LENGTH = 1e-12
"""A shorter vector, which has no direction, is not normalised to more than this allows."""


def finished_vector(pooled: bytes, num_tokens: int, recipe: PoolingRecipe, length: int | None) -> NDArray[np.float32]:
    """float32 [length], or all of it: `pooled` is float64 [C] of a text of `num_tokens`, the sum for a mean."""
    vector = np.frombuffer(pooled, dtype=np.float64)
    if recipe.kind == "mean":
        vector = vector / num_tokens
    vector = vector[:length]
    if recipe.normalise:
        vector = vector / max(float(np.linalg.norm(vector)), LEAST_LENGTH)
    return vector.astype(np.float32)


class PooledStates:
    """All inputs of one API request. Must be closed."""

    def __init__(self, requests: list[GenerationRequest], streams: list[RequestStream], meter: RequestMeter) -> None:
        self._streams, self._meter = streams, meter
        self._unfinished = requests[::-1]

    async def collect(self) -> list[bytes]:
        """float64 [C] of each input, in order. Raises ApiError when the engine refuses, fails or runs out of time."""
        try:
            states = []
            for stream in self._streams:
                states.append(await _state(stream))
                self._count_end("stop")
            return states
        except Exception as error:
            self._end_all(end_reason(error))
            raise

    def _count_end(self, reason: str) -> None:
        self._meter.ended(reason, len(self._unfinished.pop().prompt_ids), 0)

    def _end_all(self, reason: str | None) -> None:
        """End what has not ended; None where the engine never took it, which no metric counts."""
        while reason is not None and self._unfinished:
            self._count_end(reason)
        self._unfinished.clear()

    def close(self) -> None:
        """Cancel what is unfinished. Idempotent, never blocks."""
        self._end_all("abort")
        for stream in self._streams:
            stream.close()


async def _state(stream: RequestStream) -> bytes:
    pooled = b""
    async for _, event in stream.events():
        if (failure := from_engine(event.refusal or event.finish_reason, event.message)) is not None:
            raise failure
        pooled = event.pooled
    if not pooled:
        raise InternalError("The engine ended a stream without a reason.")
    return pooled
