"""The body of POST /v1/completions. Used by `server/api/completions.py` and the OpenAPI document; API process."""

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from server.schema.common import INT32_MAX, GenerationBody

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}

Prompt = str | list[str] | list[int] | list[list[int]]


def is_id_list(value: object) -> bool:
    """A list of integers; booleans are none."""
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_prompt(value: Any) -> Any:
    """The value itself. Raises ValueError unless it is a `Prompt`, all items of one kind."""
    if isinstance(value, str) or is_id_list(value):
        return value
    if isinstance(value, list) and (all(isinstance(item, str) for item in value) or all(map(is_id_list, value))):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")


AnyPrompt = Annotated[
    Prompt,
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: AnyPrompt
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def logprob_count(self) -> int:
        """-1 none, else alternatives beside the chosen token."""
        return -1 if self.logprobs is None else self.logprobs
