"""The bodies of POST /tokenize and /detokenize, shaped like vLLM's. Used by `server/api/tokens.py`; API process."""

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict

from server.errors import BadRequest
from server.schema.chat import Message, unhonoured_details
from server.schema.common import RequestBody, TokenId
from server.schema.reasoning import ReasoningFields
from server.schema.template import TemplateFields
from server.schema.tools import ToolFields, check_answers

_EITHER: tuple[JsonDict, ...] = (
    {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
    {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
)


class TokenizeBody(TemplateFields, ToolFields, ReasoningFields, RequestBody):
    """POST /tokenize: either a raw prompt or a conversation, with what else in a chat request makes its prompt."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [*_EITHER]})

    model: str | None = Field(default=None, min_length=1, max_length=256)
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, fail_fast=True)
    add_special_tokens: bool | None = Field(
        default=None, description="default true for a prompt, false for a conversation"
    )
    return_token_strs: bool | None = None

    @property
    def unhonoured(self) -> dict[str, object]:
        """Parameters that are accepted and change nothing."""
        return unhonoured_details(self.messages or [])

    def check_together(self) -> None:
        """Rules over several fields. Raises BadRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("Give either prompt or messages.", param="prompt")
        if self.prompt is not None and self.tools:
            raise BadRequest("tools are only allowed with messages.", param="tools")
        self.check_template_fields()
        self.check_tools()
        check_answers(self.messages or [])


class DetokenizeBody(RequestBody):
    """POST /detokenize"""

    model: str | None = Field(default=None, min_length=1, max_length=256)
    tokens: list[TokenId] = Field(fail_fast=True)
