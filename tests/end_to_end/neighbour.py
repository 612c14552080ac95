"""A client that goes on as before while others misbehave."""

import threading
from typing import Any

import httpx

from tests.end_to_end.conftest import Server, sse_events

REQUEST = {"prompt": "The history of astronomy is", "max_tokens": 24, "temperature": 0.8, "seed": 5, "stream": True}

REST_SECONDS = 0.3
"""After an answer, which takes about as long: who never rests computes more than the tests beside it."""


class Neighbour:
    """A client that asks the same, again and again, while others misbehave; every answer must be the first one."""

    def __init__(self, server: Server) -> None:
        self._server = server
        # made here, as that takes long enough to miss what the others do
        self._client = server.client()
        self.answers: list[list[int]] = []
        self.failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _ask(self) -> list[int]:
        ids: list[int] = []
        body = {"model": self._server.model, "ignore_eos": True, "return_token_ids": True, **REQUEST}
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            for event in sse_events(response.iter_lines()):
                choices: Any = event.get("choices", [])
                ids += [token for choice in choices for token in choice.get("token_ids") or []]
        return ids

    def _run(self) -> None:
        try:
            self.answers.append(self._ask())
            while not self._stop.wait(REST_SECONDS):
                self.answers.append(self._ask())
        except (httpx.HTTPError, ValueError) as error:
            self.failure = error

    def __enter__(self) -> "Neighbour":
        self.answers.append(self._ask())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._client.close()
        assert self.failure is None
        assert len(self.answers) >= 2
        assert all(answer == self.answers[0] for answer in self.answers)
        assert len(self.answers[0]) == REQUEST["max_tokens"]
