"""Log-probabilities in the shapes of OpenAI's two APIs, and of prompts in vLLM's. Used by the renderers; API process.

Entries are of tokens that are text: end tokens have none, so the entries' bytes are the text's.
"""

import codecs
from collections.abc import Sequence

from server.choice import TextToken
from server.prompt.tokenizer import Tokenizer
from server.stream import Generation
from server.wire import Logprob


class TokenNaming:
    """How tokens are called: by their text, or `token_id:5`."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def data(self, token_id: int) -> bytes:
        """The token's true bytes."""
        return self._tokenizer.token_bytes(token_id)

    def text(self, token_id: int, data: bytes) -> str:
        """For a field of its own; part of a character shows as U+FFFD. `data` are its bytes that are shown."""
        return f"token_id:{token_id}" if self._as_ids else data.decode("utf-8", "replace")

    def key(self, token_id: int, data: bytes) -> str:
        """For a key: part of a character as `bytes:\\xf0\\x9f`, so that different tokens stay different keys."""
        if self._as_ids:
            return f"token_id:{token_id}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_entry(naming: TokenNaming, token_id: int, data: bytes, value: float | None) -> dict[str, object]:
    return {"token": naming.text(token_id, data), "logprob": value, "bytes": list(data)}


def chat_logprobs(tokens: Sequence[TextToken], naming: TokenNaming) -> dict[str, object]:
    """`choices[].logprobs` of chat."""
    return {"content": chat_entries(tokens, naming), "refusal": None}


def chat_entries(tokens: Sequence[TextToken], naming: TokenNaming) -> list[dict[str, object]]:
    """One for each token; values are natural logarithms, descending in `top_logprobs`."""
    content = []
    for token in tokens:
        pairs = zip(token.top_ids, token.top_values, strict=True)
        top = [_chat_entry(naming, token_id, naming.data(token_id), value) for token_id, value in pairs]
        content.append(_chat_entry(naming, token.token_id, token.data, token.value) | {"top_logprobs": top})
    return content


class CompletionLogprobs:
    """`choices[].logprobs` of completions, part by part: offsets (in characters) run on over the parts."""

    def __init__(self, naming: TokenNaming) -> None:
        self._naming, self._offset = naming, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def part(self, tokens: Sequence[TextToken]) -> dict[str, object]:
        """Of the next tokens of the choice."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset + bool(self._decoder.getstate()[0]))  # a character that has begun counts
            self._offset += len(self._decoder.decode(token.data))
        return {
            "text_offset": offsets,
            "token_logprobs": [token.value for token in tokens],
            "tokens": [self._naming.key(token.token_id, token.data) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
        }

    def _top(self, token: TextToken) -> dict[str, float] | None:
        """The alternatives and the token itself: up to one more than was asked for, as OpenAI documents."""
        if token.value is None:
            return None
        top: dict[str, float] = {}
        for token_id, value in zip(token.top_ids, token.top_values, strict=True):
            top.setdefault(self._naming.key(token_id, self._naming.data(token_id)), value)
        top.setdefault(self._naming.key(token.token_id, token.data), token.value)
        return top


def prompt_logprobs(
    generation: Generation, index: int, count: int, naming: TokenNaming
) -> list[dict[str, object] | None]:
    """vLLM's `prompt_logprobs` of the prompt that choice `index` continues: None for its first token, then for each the
    token itself and its `count` most likely alternatives, by id. `rank` counts from 1, None where logits were not
    finite."""
    tokens = generation.prompt_ids(index)[1:]
    found = zip(tokens, generation.prompt_logprobs(index), strict=True)
    return [None, *(_prompt_entry(token_id, entry, count, naming) for token_id, entry in found)]


def _prompt_entry(token_id: int, logprob: Logprob, count: int, naming: TokenNaming) -> dict[str, object]:
    found = {token_id: (logprob.value, logprob.rank or None)}
    for rank, (top_id, value) in enumerate(zip(logprob.top_ids[:count], logprob.top_values[:count], strict=True), 1):
        found.setdefault(top_id, (value, rank))
    return {
        str(known): {"logprob": value, "rank": rank, "decoded_token": naming.data(known).decode("utf-8", "replace")}
        for known, (value, rank) in found.items()
    }
