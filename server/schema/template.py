"""What a request may say about how its messages become a prompt. Part of the schemas of chat; API process."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, WithJsonSchema

from server.errors import BadRequest

MAX_VARIABLES = 64
MAX_VARIABLE_BYTES = 16 * 1024


def _bounded(value: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(value)) > MAX_VARIABLE_BYTES:
        raise ValueError(f"must not exceed {MAX_VARIABLE_BYTES} bytes of JSON")
    return value


_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,63}$"
Variables = Annotated[
    dict[Annotated[str, Field(pattern=_NAME)], Any],
    Field(max_length=MAX_VARIABLES),
    AfterValidator(_bounded),
    WithJsonSchema({"type": "object", "propertyNames": {"pattern": _NAME}, "maxProperties": MAX_VARIABLES}),
]


class TemplateFields(BaseModel):
    """Parameters of the chat template, in vLLM's names."""

    add_generation_prompt: bool | None = Field(
        default=None, description="end with what begins the answer; default true unless continue_final_message"
    )
    continue_final_message: bool | None = Field(default=None, description="the answer goes on with the last message")
    chat_template_kwargs: Variables | None = Field(default=None, description="further variables of the template")

    @property
    def ends_with_answer(self) -> bool:
        """Whether the prompt ends with what begins the assistant's answer."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def check_template_fields(self) -> None:
        """Rules over several fields. Raises BadRequest."""
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "add_generation_prompt and continue_final_message cannot both be true.", param="add_generation_prompt"
            )
