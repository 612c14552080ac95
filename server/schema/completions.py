"""The body of POST /v1/completions. Used by `server/api/completions.py` and the OpenAPI document; API process."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, WithJsonSchema

from server.schema.common import INT32_MAX, GenerationBody

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}

Prompt = str | list[str] | list[int] | list[list[int]]


def is_id_list(value: object) -> bool:
    """A list of integers, not empty; booleans are none."""
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _check_prompt(value: Any) -> Any:
    """The value itself. Raises ValueError unless it is a `Prompt`, all items of one kind and none empty."""
    if value in ("", []):
        raise ValueError("must not be empty")
    if isinstance(value, str) or is_id_list(value):
        return value
    if isinstance(value, list) and (all(_is_text(item) for item in value) or all(map(is_id_list, value))):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists, none empty")


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


def num_prompts(prompt: Prompt) -> int:
    """How many prompts these are."""
    return 1 if isinstance(prompt, str) or is_id_list(prompt) else len(prompt)


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompts_field: ClassVar[str] = "prompt"

    prompt: AnyPrompt
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = Field(default=None, description="to prompts that are texts; default true")

    @property
    def token_limit(self) -> int:
        """The most tokens that the client wants."""
        limit = super().token_limit
        return DEFAULT_MAX_TOKENS if limit is None else limit

    @property
    def num_prompts(self) -> int:
        """Prompts in this request."""
        return num_prompts(self.prompt)

    @property
    def logprob_count(self) -> int:
        """-1 none, else how many alternatives are reported beside the chosen token."""
        return -1 if self.logprobs is None else self.logprobs
