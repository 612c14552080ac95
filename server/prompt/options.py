"""How a conversation becomes a prompt, beside its messages: what requests may say about it, and the checks.

Made by `server/api/conversation.py`, read by `server/prompt/build.py` and its renderers; API process. Pure.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from server.errors import BadRequest, context_overflow

MAX_TRUNCATED = 8
"""A prompt that is to be truncated may have this many times the model's length in token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The defaults are those of a request that says nothing."""

    add_generation_prompt: bool = True
    """End with what begins the assistant's answer."""
    continue_final_message: bool = False
    """End in the last message, so that the answer goes on with it."""
    add_special_tokens: bool = False
    """Of the tokenizer, such as a BOS, around what the template wrote."""
    variables: Mapping[str, object] = field(default_factory=dict)
    """Further variables of the template, JSON values."""
    tools: Sequence[Mapping[str, object]] = ()
    """As templates take them; shown in words where the template does not."""
    keep_last: int | None = None
    """Only so many tokens of the prompt, its last ones."""
    drop_oldest: bool = False
    """Leave out the oldest turns of a conversation that is too long (`server/prompt/fit.py`)."""


def keep_last(truncate: int | None, max_model_len: int, answer: int) -> int | None:
    """Tokens that `truncate_prompt_tokens` leaves: -1 is what the model's length leaves beside an answer of so many.
    Raises BadRequest."""
    if truncate is None or 0 < truncate <= max_model_len:
        return truncate
    if truncate == -1:
        room = max_model_len - answer
        return room if room > 0 else max_model_len - 1
    raise BadRequest(
        f"truncate_prompt_tokens must be -1, or from 1 to the model's length of {max_model_len} tokens.",
        param="truncate_prompt_tokens",
    )


def checked_ids(ids: "array[int]", max_model_len: int, param: str, least_output: int = 1) -> "array[int]":
    """The ids of a prompt. Raises BadRequest where there are none, or no room for so many tokens of an answer."""
    if not ids:
        raise BadRequest(f"{param} must not be empty: it holds no token.", param=param)
    if len(ids) + least_output > max_model_len:
        raise context_overflow(len(ids), max_model_len, param=param)
    return ids
