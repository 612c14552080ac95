"""The body of POST /v1/chat/completions. Used by `server/api/chat.py` and the OpenAPI document; API process."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic.config import JsonDict

from server.errors import BadRequest
from server.schema.common import INT32_MAX, GenerationBody
from server.schema.reasoning import ReasoningFields
from server.schema.template import TemplateFields
from server.schema.tools import ToolFields, check_answers

MAX_TOP_LOGPROBS = 20

# What the validators below demand, in the words of JSON schema.
_PARTS: tuple[JsonDict, ...] = (
    {"properties": {"type": {"const": "text"}, "text": {"type": "string"}}, "required": ["text"]},
    {
        "properties": {"type": {"const": "image_url"}, "image_url": {"type": ["string", "object"]}},
        "required": ["image_url"],
    },
)
_SOME_CONTENT: JsonDict = {"type": ["string", "array"]}
_BY_ROLE: tuple[JsonDict, ...] = (
    {"properties": {"role": {"const": "assistant"}}},
    {
        "properties": {"role": {"enum": ["system", "developer", "user"]}, "content": _SOME_CONTENT},
        "required": ["content"],
    },
    {
        "properties": {"role": {"const": "tool"}, "content": _SOME_CONTENT, "tool_call_id": {"type": "string"}},
        "required": ["content", "tool_call_id"],
    },
)


class ImageUrl(BaseModel):
    """Where an image is: a data: URL, or one of a host that the server may fetch from."""

    model_config = ConfigDict(strict=True, extra="allow")

    url: str = Field(min_length=1)
    detail: Literal["auto", "low", "high"] | None = Field(
        default=None, description="has no effect: each model has its own resolution"
    )


def _url_kind(value: object) -> str:
    return "(url)" if isinstance(value, str) else "(object)"


AnyImageUrl = Annotated[
    Annotated[str, Field(min_length=1), Tag("(url)")] | Annotated[ImageUrl, Tag("(object)")], Discriminator(_url_kind)
]


class ContentPart(BaseModel):
    """One part of a message. Types other than text and image_url are refused later, by name."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra={"anyOf": [*_PARTS]})

    type: str = Field(min_length=1, max_length=64)
    text: str | None = None
    image_url: AnyImageUrl | None = None

    @model_validator(mode="after")
    def _type_has_its_field(self) -> "ContentPart":
        if self.type == "text" and self.text is None:
            raise ValueError("a part of type 'text' needs a string in 'text'")
        if self.type == "image_url" and self.image_url is None:
            raise ValueError("a part of type 'image_url' needs an object with a 'url' in 'image_url'")
        return self


class FunctionCall(BaseModel):
    """A function that the assistant called earlier; `arguments` is JSON in a string."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call in an earlier assistant message."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


def _content_kind(value: object) -> str:
    return "(parts)" if isinstance(value, list) else "(text)"


Content = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[ContentPart], Field(fail_fast=True), Tag("(parts)")],
    Discriminator(_content_kind),
]


class Message(BaseModel):
    """One message of the conversation."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra={"anyOf": [*_BY_ROLE]})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, fail_fast=True)
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _role_has_its_fields(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role '{self.role}' needs content")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of role 'tool' needs a tool_call_id")
        if (self.model_extra or {}).get("function_call") is not None:
            raise ValueError("function_call is not supported; give the call in tool_calls")
        return self


def unhonoured_details(messages: list[Message]) -> dict[str, object]:
    """`image_url.detail`, where a message asks for a resolution: models have their own."""
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part.image_url, ImageUrl) and part.image_url.detail not in (None, "auto"):
                return {"image_url.detail": part.image_url.detail}
    return {}


class ChatBody(TemplateFields, ToolFields, ReasoningFields, GenerationBody):
    """POST /v1/chat/completions, and what the other chat surfaces are translated into."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX, description="wins over max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool | None = Field(
        default=None,
        description="such as a BOS, around what the template wrote; default false",
    )

    @property
    def unhonoured(self) -> dict[str, object]:
        """Parameters that are accepted and change nothing."""
        return unhonoured_details(self.messages)

    @property
    def logprob_count(self) -> int:
        """-1 none, else how many alternatives are reported beside the chosen token."""
        return (self.top_logprobs or 0) if self.logprobs else -1

    def check_together(self, max_sequences: int) -> None:
        """Rules over several fields. Raises BadRequest."""
        super().check_together(max_sequences)
        self.check_template_fields()
        self.check_tools()
        check_answers(self.messages)
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
