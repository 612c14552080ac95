"""Limits and policy of the HTTP gateway. Declared once here; the command line's options are made from these fields.

Parsed in the supervisor, read in the API process.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from model_runtime.pooling_config import PoolingChoice

ToolCallParser: TypeAlias = Literal[
    "auto",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "kimi_k3",
    "harmony",
    "mistral",
    "qwen3_coder",
    "glm45",
    "hermes",
    "llama3_json",
    "json",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Who may ask, for how much, under which model name."""

    served_model_name: str = field(
        default="",
        metadata={"help": "name of the model in the API, aliases after commas; empty: its file or folder name"},
    )
    api_key: tuple[str, ...] = field(default=(), metadata={"help": "accepted API keys; without any, everybody may ask"})
    cors_allow_origins: tuple[str, ...] = field(
        default=(), metadata={"help": "origins whose web pages may call the API, '*' for all"}
    )
    max_body_bytes: int = field(
        default=32 * 1024 * 1024, metadata={"help": "largest request body; larger ones get 413", "unit": "bytes"}
    )
    max_held_body_bytes: int = field(
        default=256 * 1024 * 1024,
        metadata={
            "help": "large bodies of all requests together, until prompts and pixels are made of them; more get 429",
            "unit": "bytes",
        },
    )
    max_head_bytes: int = field(
        default=64 * 1024,
        metadata={"help": "largest request line and headers together; larger ones get 431", "unit": "bytes"},
    )
    body_timeout: float = field(
        default=30.0,
        metadata={
            "help": "seconds in which a request's headers, and then its body, must arrive; slower ones get 408; and "
            "for which a client may take next to nothing of its answer: then its connection is reset"
        },
    )
    max_sequences_per_request: int = field(
        default=128, metadata={"help": "prompts times n of one request; more get 400"}
    )
    max_unread_events: int = field(
        default=16384,
        metadata={"help": "token events that a client may leave unread; with more its request ends"},
    )
    max_stored_responses: int = field(
        default=1024, metadata={"help": "responses kept for each API key; the oldest makes room for a new one"}
    )
    max_stored_response_bytes: int = field(
        default=64 * 1024 * 1024,
        metadata={"help": "responses kept for each API key, with the conversations before them", "unit": "bytes"},
    )
    stored_response_seconds: float = field(default=3600.0, metadata={"help": "seconds for which a response is kept"})
    strict_params: bool = field(
        default=False, metadata={"help": "refuse unknown parameters instead of naming them in x-ignored-params"}
    )
    tool_call_parser: ToolCallParser = field(
        default="auto", metadata={"help": "format in which the model writes tool calls; auto: its chat template tells"}
    )
    pooling: PoolingChoice = field(
        default="auto",
        metadata={
            "help": "what /v1/embeddings makes of a text's hidden states: their mean or the last one, of length 1; "
            "auto: what the checkpoint says, if anything"
        },
    )
    access_log: bool = field(default=True, metadata={"help": "log one line for each request"})

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the rule."""
        limits = (
            "max_body_bytes",
            "max_held_body_bytes",
            "max_head_bytes",
            "body_timeout",
            "max_sequences_per_request",
            "max_unread_events",
            "max_stored_responses",
            "max_stored_response_bytes",
            "stored_response_seconds",
        )
        for name in limits:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive")
        if any(not key for key in self.api_key):
            raise ValueError("api_key must not be empty")

    def model_names(self, default: str) -> tuple[str, ...]:
        """The names that the model answers to, the first one being its own; `default` where none is configured."""
        names = tuple(name.strip() for name in self.served_model_name.split(",") if name.strip())
        return names or (default,)
