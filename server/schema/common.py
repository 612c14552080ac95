"""What the generation routes have in common: parameters with their ranges, and how a failed check becomes a 400.

Used by the schemas of this package and by `server/api`; API process. Fields are strict: a boolean or a string is no
number, NaN and infinity are nothing. `null` means omitted.
"""

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from server.errors import BadRequest
from server.grammar.grammar import Grammar
from server.schema.structured import ResponseFormat, StructuredOutputs

INT32_MAX = 2**31 - 1
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_PROMPT_LOGPROBS = 20
MAX_REPORTED_ERRORS = 3
PLAIN_MESSAGES = {
    "missing": "a value is required",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "extra_forbidden": "there is no such field",
    "string_pattern_mismatch": "holds characters that are not allowed, or too many",
}
"""Instead of the validator's own, which speak of Python."""
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[
    list[StopString],
    BeforeValidator(_as_list),
    Field(max_length=MAX_STOP_STRINGS),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                    "maxItems": MAX_STOP_STRINGS,
                },
            ]
        }
    ),
]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(BaseModel):
    """`stream_options`"""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """With include_usage: every chunk has the usage so far (vLLM's name)."""
    include_obfuscation: bool | None = None
    """Accepted for OpenAI's clients; chunks are never padded."""


class RequestBody(BaseModel):
    """Any JSON body."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    prompts_field: ClassVar[str] = ""
    """The field that may be a list of prompts."""

    @property
    def unhonoured(self) -> dict[str, object]:
        """Parameters that are accepted and change nothing."""
        return {}

    def refuse(self, names: Sequence[str]) -> None:
        """Raises BadRequest where one of these parameters is given, which the schema does not declare."""
        for name in names:
            if (self.model_extra or {}).get(name) is not None:
                raise BadRequest(f"{name} is not supported.", param=name)


class QueueFields(BaseModel):
    """When it is a request's turn, what it is called, and with whom it shares what is cached."""

    priority: int | None = Field(default=None, ge=-INT32_MAX, le=INT32_MAX, description="lower is served first")
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    request_id: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._:\-]{1,128}$")

    @property
    def salt(self) -> bytes:
        """Requests with different ones share nothing that is cached."""
        return (self.cache_salt or "").encode()


class SamplingFields(QueueFields):
    """How tokens are chosen, when the text ends, and when it is a request's turn. Surfaces that are translated into
    chat requests have these fields too, beyond what their API knows, and hand them on."""

    min_tokens: int | None = Field(default=None, ge=0, le=INT32_MAX)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=INT32_MAX, description="0 and -1 are off")
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    stop: StopStrings | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=128)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Bias] | None = Field(default=None, max_length=1024)
    bad_words: list[Annotated[str, Field(min_length=1, max_length=1024)]] | None = Field(default=None, max_length=128)


class GenerationBody(SamplingFields, RequestBody):
    """Parameters of both generation routes."""

    model: str = Field(min_length=1, max_length=256)
    max_tokens: int | None = Field(default=None, ge=0, le=INT32_MAX)
    max_completion_tokens: int | None = Field(default=None, ge=0, le=INT32_MAX, description="wins over max_tokens")
    n: int | None = Field(default=None, ge=1, le=INT32_MAX)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="name tokens 'token_id:5' in log-probabilities"
    )
    prompt_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_PROMPT_LOGPROBS,
        description="log-probabilities of the prompt's tokens, with so many alternatives",
    )
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1, le=INT32_MAX, description="keep the prompt's last tokens; -1: as many as fit"
    )
    user: str | None = Field(default=None, max_length=1024)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def grammar(self) -> Grammar | None:
        """What the output must look like."""
        if self.structured_outputs is not None:
            return self.structured_outputs.as_grammar
        return None if self.response_format is None else self.response_format.grammar

    @property
    def closes(self) -> bool:
        """Whether the output should be whole before the last token that it may have."""
        return self.structured_outputs is not None and bool(self.structured_outputs.close_before_max_tokens)

    @property
    def token_limit(self) -> int | None:
        """The most tokens that the client wants, None for as many as there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    @abstractmethod
    def logprob_count(self) -> int:
        """-1 none, else how many alternatives are reported beside the chosen token."""

    @property
    def num_prompts(self) -> int:
        """Prompts in this request."""
        return 1

    def check_together(self, max_sequences: int) -> None:
        """Rules over several fields. Raises BadRequest."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only allowed when stream is true.", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequest("prompt_logprobs are not available in a stream.", param="prompt_logprobs")
        self._check_grammar()
        limit = self.token_limit
        if self.min_tokens is not None and limit is not None and self.min_tokens > limit:
            raise BadRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({limit}).", param="min_tokens"
            )
        if self.num_prompts * (self.n or 1) > max_sequences:
            raise BadRequest(
                f"The number of prompts times n must not exceed {max_sequences}.",
                param="prompt" if self.num_prompts > max_sequences else "n",
            )

    def _check_grammar(self) -> None:
        if self.structured_outputs is not None and self.response_format is not None:
            raise BadRequest("Give either response_format or structured_outputs.", param="structured_outputs")
        if self.closes and (self.bad_words or self.min_tokens):
            raise BadRequest(
                "close_before_max_tokens is not available with bad_words or min_tokens, which could forbid the end.",
                param="structured_outputs.close_before_max_tokens",
            )


Body = TypeVar("Body", bound=RequestBody)


def validate(schema: type[Body], document: dict[str, Any]) -> Body:
    """The checked request. Raises BadRequest that names the field and never repeats what was sent."""
    present = {name: value for name, value in document.items() if value is not None}
    try:
        return schema.model_validate(present)
    except ValidationError as error:
        raise _bad_request(error) from None


def _bad_request(error: ValidationError) -> BadRequest:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    texts = []
    for detail in details[:MAX_REPORTED_ERRORS]:
        message = PLAIN_MESSAGES.get(detail["type"], detail["msg"].removeprefix("Value error, "))
        texts.append(f"{_param(detail['loc']) or 'body'}: {message}")
    more = len(details) - len(texts)
    suffix = f" ({more} more)" if more else ""
    return BadRequest("; ".join(texts) + suffix, param=_param(details[0]["loc"]))


def _param(loc: tuple[int | str, ...]) -> str | None:
    """`messages[0].content`; what is neither an index nor a field name (such as a label of a union) is left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _FIELD_NAME.fullmatch(part):
            path += f".{part}" if path else part
    return path or None
