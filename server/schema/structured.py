"""`response_format` and `structured_outputs`: what the output of a request must look like. Part of the generation
routes' bodies (`common.py`); API process.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from server.grammar.grammar import Grammar, Kind

MAX_CHOICES = 1024
MAX_STRUCTURES = 128
_FORMAT, _STRUCTURED = "response_format", "structured_outputs"
_SCHEMA_PARAM = f"{_FORMAT}.json_schema.schema"
JsonSchema = dict[str, Any]
Text = Annotated[str, Field(min_length=1)]


class JsonSchemaFormat(BaseModel):
    """A schema with its name. It is obeyed whether `strict` or not."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    json_schema: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's way to ask for JSON."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_where_one_is_needed(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with the type 'json_schema', and only there")
        return self

    @property
    def grammar(self) -> Grammar | None:
        """None for text."""
        if self.type == "text":
            return None
        if self.json_schema is None:
            return Grammar(kind="json_object", param=_FORMAT)
        schema = self.json_schema.json_schema
        return Grammar(kind="json_schema", text=_dumps({} if schema is None else schema), param=_SCHEMA_PARAM)


class Structure(BaseModel):
    """One thing that may stand in the text: `begin`, JSON of the schema, `end`."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    begin: Text
    json_schema: JsonSchema = Field(alias="schema")
    end: str


class StructuralTag(BaseModel):
    """Free text, in which whatever begins with one of the triggers is one of the structures."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["structural_tag"] | None = None
    structures: list[Structure] = Field(min_length=1, max_length=MAX_STRUCTURES)
    triggers: list[Text] = Field(min_length=1, max_length=MAX_STRUCTURES)


class StructuredOutputs(BaseModel):
    """vLLM's way to ask for anything that a grammar can say: exactly one of its fields, and an option."""

    model_config = ConfigDict(strict=True, extra="forbid", populate_by_name=True)

    json_: JsonSchema | str | None = Field(default=None, alias="json", description="a JSON schema, or its text")
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: list[Text] | None = Field(default=None, min_length=1, max_length=MAX_CHOICES)
    grammar: Text | None = Field(default=None, description="in the notation of Lark, or of llama.cpp (GBNF)")
    structural_tag: StructuralTag | str | None = Field(default=None, description="tags, or their JSON text")
    close_before_max_tokens: bool | None = Field(
        default=None,
        description="towards max_tokens lead the output to its end, where there is one in time",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> "StructuredOutputs":
        forms = StructuredOutputs.model_fields.keys() - {"close_before_max_tokens"}
        given = [name for name in forms if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError("exactly one of json, json_object, regex, choice, grammar and structural_tag is needed")
        if isinstance(self.structural_tag, str):
            self.structural_tag = _parsed_tag(self.structural_tag)
        return self

    @property
    def as_grammar(self) -> Grammar:
        """The one that is asked for."""
        if self.json_ is not None:
            return _grammar("json_schema", "json", self.json_ if isinstance(self.json_, str) else _dumps(self.json_))
        if self.regex is not None:
            return _grammar("regex", "regex", self.regex)
        if self.choice is not None:
            return _grammar("choice", "choice", _dumps(self.choice))
        if self.grammar is not None:
            return _grammar("grammar", "grammar", self.grammar)
        if isinstance(self.structural_tag, StructuralTag):
            return _grammar("structural_tag", "structural_tag", self.structural_tag.model_dump_json(by_alias=True))
        return _grammar("json_object", "json_object", "")


def _parsed_tag(text: str) -> StructuralTag:
    try:
        return StructuralTag.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"structural_tag: {error.errors()[0]['msg']}") from None


def _grammar(kind: Kind, field: str, text: str) -> Grammar:
    return Grammar(kind=kind, text=text, param=f"{_STRUCTURED}.{field}")


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
