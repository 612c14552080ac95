"""The bodies of POST /v1/messages and /v1/messages/count_tokens. Used by `server/messages` and the OpenAPI document.

API process. Blocks within messages are checked where they are translated (`server/messages/translate.py`).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from server.schema.common import INT32_MAX, MAX_STOP_STRINGS, RequestBody, StopString

REFUSED = ("container", "context_management", "mcp_servers")
"""What Anthropic has and this server does not: ignoring it would change the answer."""


def _content_kind(value: object) -> str:
    return "(blocks)" if isinstance(value, list) else "(text)"


Blocks = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[dict[str, Any]], Field(fail_fast=True), Tag("(blocks)")],
    Discriminator(_content_kind),
]


class AnthropicMessage(BaseModel):
    """One message: a text, or a list of blocks (text, image, thinking, tool_use, tool_result)."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["user", "assistant", "system"]
    content: Blocks


class Thinking(BaseModel):
    """`thinking`: whether the model may reason first, where its chat template leaves that open."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)


class ToolChoice(BaseModel):
    """`tool_choice`; `any` demands a call, `tool` one of the tool that is named."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(BaseModel):
    """`output_config`. A format is {"type": "json_schema", "schema"}."""

    model_config = ConfigDict(strict=True, extra="allow")

    effort: str | None = Field(default=None, max_length=64)
    format: dict[str, Any] | None = None


class CountTokensBody(RequestBody):
    """POST /v1/messages/count_tokens: what the prompt is made of."""

    model: str = Field(min_length=1, max_length=256)
    messages: list[AnthropicMessage] = Field(min_length=1, fail_fast=True)
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def check_together(self) -> None:
        """Rules over several fields. Raises BadRequest."""
        self.refuse(REFUSED)


class MessagesBody(CountTokensBody):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1, le=INT32_MAX)
    stop_sequences: list[StopString] | None = Field(default=None, max_length=MAX_STOP_STRINGS)
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=INT32_MAX)
    stream: bool | None = None
