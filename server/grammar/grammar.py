"""What the output of a request must look like, as clients say it, and who checks that. Made by `server/schema`."""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from scheduler.request import OutputGrammar
from server.reasoning import ReasoningMarks

Kind: TypeAlias = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag", "calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """Turned into an `OutputGrammar` for the engine by a `Checker`."""

    kind: Kind
    text: str = ""
    """By kind: nothing; a JSON schema; a regular expression; a JSON list of strings; a grammar in Lark's or llama.cpp's
    notation; JSON with `structures` (each begin, schema, end) and `triggers`; JSON with `calls` (structures
    with names) and `only_one`."""
    answer: "Grammar | None" = None
    """Of kind `calls`: what may come instead."""
    param: str = "structured_outputs"
    """The field of the request that it came from, for errors."""
    reasoning: ReasoningMarks | None = None
    """Of a model that reasons: what it thinks may come before."""
    is_reasoning: bool = False
    """The prompt ends inside the reasoning."""


class Checker(Protocol):
    """Implemented by `checker.py`, and by tests."""

    async def check(self, grammar: Grammar) -> OutputGrammar:
        """The grammar as `SamplingParams` has it. Raises ApiError: BadRequest that names the place, where it cannot be
        obeyed."""
        ...
