"""A piece of a tool call, as it is found in the text of an output, and of an answer, which may have calls among its
content. Made by the parsers of this package, read by the renderers of every API surface; API process."""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPart:
    """The beginning of a call (it has an id and a name), more of its arguments, or its end, or several of these."""

    index: int
    """Of the call in its choice, from 0."""
    id: str = ""
    name: str = ""
    arguments: str = ""
    """A piece of JSON; all pieces of a complete call together are an object."""
    is_complete: bool = False
    """The call is complete with this piece."""


AnswerPart: TypeAlias = str | CallPart
"""Some content, or a piece of a call. Parts keep the order in which the model wrote them."""
