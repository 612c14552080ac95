"""The body of POST /v1/embeddings. Used by `server/api/embeddings.py` and the OpenAPI document; API process."""

from typing import ClassVar, Literal

from pydantic import Field

from server.errors import BadRequest
from server.schema.common import INT32_MAX, QueueFields, RequestBody
from server.schema.completions import AnyPrompt, num_prompts


class EmbeddingsBody(QueueFields, RequestBody):
    """POST /v1/embeddings"""

    prompts_field: ClassVar[str] = "input"

    model: str = Field(min_length=1, max_length=256)
    input: AnyPrompt
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="base64: of float32 numbers, little endian; default float"
    )
    dimensions: int | None = Field(
        default=None, ge=1, le=INT32_MAX, description="keep so many numbers, where the model was trained for it"
    )
    user: str | None = Field(default=None, max_length=1024)
    add_special_tokens: bool | None = Field(default=None, description="to inputs that are texts; default true")
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1, le=INT32_MAX, description="keep an input's last tokens; -1: as many as fit"
    )

    def check_together(self, max_sequences: int) -> None:
        """Rules beyond single fields. Raises BadRequest."""
        if num_prompts(self.input) > max_sequences:
            raise BadRequest(
                f"The request has {num_prompts(self.input)} inputs; {max_sequences} is the limit.", param="input"
            )
