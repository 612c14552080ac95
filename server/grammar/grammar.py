"""What the whole output of a request must look like, as clients say it. Made by schemas, read by `lark.py`. Pure."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """Checked by `checker.Checker` in the API process, which makes Lark of it for the engine."""

    kind: Kind
    text: str = ""
    """By kind: nothing; a JSON schema; a regular expression; a JSON list of strings; a grammar in Lark's or llama.cpp's
    notation; JSON with `structures` (each begin, schema, end) and `triggers`."""
    param: str = "structured_outputs"
    """The field of the request that it came from, for errors."""
