"""What the output of a request must look like, as clients say it, and who checks that. Made by `server/schema`."""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

Kind: TypeAlias = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """Turned into Lark for the engine by a `Checker`."""

    kind: Kind
    text: str = ""
    """By kind: nothing; a JSON schema; a regular expression; a JSON list of strings; a grammar in Lark's or llama.cpp's
    notation; JSON with `structures` (each begin, schema, end) and `triggers`."""
    param: str = "structured_outputs"
    """The field of the request that it came from, for errors."""


class Checker(Protocol):
    """Implemented by `checker.py`, and by tests."""

    async def lark(self, grammar: Grammar) -> str:
        """The grammar as `SamplingParams` has it. Raises ApiError: BadRequest that names the place, where it cannot be
        obeyed."""
        ...
