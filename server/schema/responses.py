"""The body of POST /v1/responses. Used by `server/responses` and the OpenAPI document; API process."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from server.errors import BadRequest
from server.schema.chat import MAX_TOP_LOGPROBS
from server.schema.common import INT32_MAX, RequestBody, SamplingFields

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (INCLUDE_LOGPROBS, "reasoning.encrypted_content")
"""The second asks for nothing here: reasoning is never hidden from the client that owns it."""
REFUSED = ("background_options", "context_management", "conversation", "image", "moderation", "prompt")
"""What other servers have and this one does not: ignoring it would change the answer."""


def _input_kind(value: object) -> str:
    return "(items)" if isinstance(value, list) else "(text)"


Input = Annotated[
    Annotated[str, Field(min_length=1), Tag("(text)")]
    | Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True), Tag("(items)")],
    Discriminator(_input_kind),
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class TextConfig(BaseModel):
    """`text`: the form of the answer. A format is {"type": "text"}, {"type": "json_object"} or {"type": "json_schema",
    "name", "schema", "strict"}."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: dict[str, Any] | None = None


class Reasoning(BaseModel):
    """`reasoning`: how much of it. Summaries are not made; the reasoning itself is in the answer."""

    model_config = ConfigDict(strict=True, extra="allow")

    effort: str | None = Field(default=None, max_length=64)


class ResponseStreamOptions(BaseModel):
    """`stream_options`. Chunks are never padded."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_obfuscation: bool | None = None


class CountBody(SamplingFields, RequestBody):
    """POST /v1/responses/input_tokens: what the prompt is made of."""

    model: str = Field(min_length=1, max_length=256)
    input: Input | None = Field(default=None, description="a text, or a list of items; optional after another response")
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, min_length=1, max_length=128)
    tools: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="auto: leave out the oldest turns of a conversation that is too long"
    )

    def check_together(self) -> None:
        """Rules over several fields. Raises BadRequest."""
        if self.input is None and self.previous_response_id is None:
            raise BadRequest("input: a value is required", param="input")
        self.refuse(REFUSED)


class ResponsesBody(CountBody):
    """POST /v1/responses"""

    max_output_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    max_tool_calls: int | None = Field(default=None, ge=1, description="of built-in tools, of which there are none")
    metadata: Metadata | None = None
    include: list[str] | None = Field(default=None, max_length=32)
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    store: bool | None = Field(default=None, description="keep the response for later requests; default true")
    background: bool | None = Field(default=None, description="answer at once, and work on")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None

    @property
    def keeps(self) -> bool:
        """Whether the response is stored."""
        return self.store is None or self.store

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities of the text's tokens are in the answer."""
        return INCLUDE_LOGPROBS in (self.include or ()) or self.top_logprobs is not None

    def check_together(self) -> None:
        """Rules over several fields. Raises BadRequest."""
        super().check_together()
        for name in self.include or ():
            if name not in INCLUDABLE:
                raise BadRequest(f"include: {name[:64]!r} is not supported.", param="include")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only allowed when stream is true.", param="stream_options")
        if self.wants_logprobs and self.tools and self.tool_choice != "none":
            raise BadRequest(
                "Log-probabilities are not available together with tools: a call has no place for them here. "
                "Chat completions give them.",
                param="top_logprobs",
            )
        if self.background and not self.keeps:
            raise BadRequest("background is only possible when store is true.", param="background")
        if self.background and self.stream:
            raise BadRequest("A response in the background is not streamed.", param="background")
