"""Log-probabilities in the shapes of OpenAI's two APIs. Used by the renderers; API process.

Entries are of tokens that are text: end tokens have none, so the entries' bytes are the text's.
"""

import codecs
from collections.abc import Sequence

from server.choice import TextToken
from server.prompt.tokenizer import Tokenizer


def _chat_entry(data: bytes, value: float | None) -> dict[str, object]:
    return {"token": data.decode("utf-8", "replace"), "logprob": value, "bytes": list(data)}


def chat_logprobs(tokens: Sequence[TextToken], tokenizer: Tokenizer) -> dict[str, object]:
    """`choices[].logprobs` of chat; values are natural logarithms, descending in `top_logprobs`."""
    content = []
    for token in tokens:
        pairs = zip(token.top_ids, token.top_values, strict=True)
        top = [_chat_entry(tokenizer.token_bytes(token_id), value) for token_id, value in pairs]
        content.append(_chat_entry(token.data, token.value) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _spelled(data: bytes) -> str:
    """A token as text; part of a character as `bytes:\\xf0\\x9f`, so that different tokens stay different keys."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """`choices[].logprobs` of completions, part by part: offsets (in characters) run on over the parts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._offset = tokenizer, 0
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
            "tokens": [_spelled(token.data) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
        }

    def _top(self, token: TextToken) -> dict[str, float] | None:
        """The alternatives and the token itself: up to one more than was asked for, as OpenAI documents."""
        if token.value is None:
            return None
        top: dict[str, float] = {}
        for token_id, value in zip(token.top_ids, token.top_values, strict=True):
            top.setdefault(_spelled(self._tokenizer.token_bytes(token_id)), value)
        top.setdefault(_spelled(token.data), token.value)
        return top
