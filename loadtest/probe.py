"""What must be known of a server before it is loaded: its model, and how words become tokens. Used by
`loadtest/runner.py`, before anything is measured."""

from typing import Any, Literal

import httpx

from loadtest.settings import LoadTestError, Server
from loadtest.words import WORDS, Calibration

PROBE_TIMEOUT_SECONDS = 60.0
ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class Probe:
    """Asks one server. Raises LoadTestError with what to do about it."""

    def __init__(self, server: Server, headers: dict[str, str], api: Literal["chat", "completions"]) -> None:
        self._server, self._api = server, api
        base = server.url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(base_url=base, headers=headers, timeout=PROBE_TIMEOUT_SECONDS, trust_env=False)

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def model(self) -> str:
        """The first model that the server lists."""
        listed = self._request("GET", "/v1/models", None)
        if listed.status_code in (401, 403):
            raise LoadTestError(f"{self._server.url} wants a key: give --api-key or set FIRSTLIGHT_API_KEY")
        try:
            return str(listed.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            text = listed.text[:100]
            raise LoadTestError(
                f"{self._server.url}/v1/models answered {listed.status_code} and no model ({text!r}): give --model"
            ) from None

    def calibrate(self, model: str) -> Calibration:
        """Counts the tokens of one word and of all words that texts are made of."""
        few, many = self._count(model, WORDS[:1]), self._count(model, (*WORDS[:1], *WORDS))
        tokens_per_word = (many - few) / len(WORDS)
        if tokens_per_word <= 0:
            raise LoadTestError(f"{self._server.url} counts {few} tokens for one word and {many} for {len(WORDS) + 1}")
        return Calibration(tokens_per_word=tokens_per_word, overhead=few - tokens_per_word)

    def _count(self, model: str, words: tuple[str, ...]) -> int:
        """The tokens of a prompt, over /tokenize (vLLM's route) or, where that is missing, the usage of an answer."""
        prompt = _prompt(self._api, " ".join(words))
        counted = self._request("POST", "/tokenize", {"model": model, **prompt})
        if counted.status_code == httpx.codes.OK:
            try:
                return int(counted.json()["count"])
            except (ValueError, KeyError, TypeError):
                # Other servers have a route of this name with another answer.
                return self._count_by_usage(model, prompt)
        return self._count_by_usage(model, prompt)

    def _count_by_usage(self, model: str, prompt: dict[str, Any]) -> int:
        answer = self._request("POST", ROUTES[self._api], {"model": model, "max_tokens": 1, **prompt})
        if answer.status_code != httpx.codes.OK:
            raise LoadTestError(
                f"{self._server.url} refused a request of one token: HTTP {answer.status_code} {answer.text[:300]}"
            )
        try:
            return int(answer.json()["usage"]["prompt_tokens"])
        except (ValueError, KeyError, TypeError):
            raise LoadTestError(
                f"{self._server.url} has no /tokenize and does not count tokens: {answer.text[:100]!r}"
            ) from None

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise LoadTestError(f"no server answers at {self._server.url}: {error or type(error).__name__}") from None


def _prompt(api: Literal["chat", "completions"], text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]} if api == "chat" else {"prompt": text}
