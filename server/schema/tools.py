"""Functions that a model may call, and what a request says about calling them. Part of the schema of chat.

`server/api` and the schemas of other chat surfaces use it; API process.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from server.errors import BadRequest
from server.tools.use import ToolUse

MAX_TOOLS = 128
NAME_PATTERN = r"^[a-zA-Z0-9_\-]{1,128}$"
"""OpenAI allows half as many characters, Anthropic these."""
FunctionName = Annotated[str, Field(pattern=NAME_PATTERN)]


class Function(BaseModel):
    """A function; `parameters` is a JSON schema of type object, none for a function without parameters."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        default=None,
        description="arguments follow the schema; always so where a call is forced, and with all tools if with one",
    )


class Tool(BaseModel):
    """One tool."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function


class FunctionRef(BaseModel):
    """The name of a function."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: FunctionName


class NamedTool(BaseModel):
    """A tool by name."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: FunctionRef


class AllowedTools(BaseModel):
    """Some of the tools."""

    model_config = ConfigDict(strict=True, extra="allow")

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsChoice(BaseModel):
    """Only some of the tools may be called."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(value: object) -> str:
    if isinstance(value, dict):
        return "(allowed)" if value.get("type") == "allowed_tools" else "(named)"
    return "(mode)"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("(mode)")]
    | Annotated[NamedTool, Tag("(named)")]
    | Annotated[AllowedToolsChoice, Tag("(allowed)")],
    Discriminator(_choice_kind),
]


class ToolFields(BaseModel):
    """Parameters about tools."""

    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = Field(
        default=None, description="default auto where there are tools; none: the model is not even told of them"
    )
    parallel_tool_calls: bool | None = Field(default=None, description="false: at most one call; default true")

    @property
    def tool_use(self) -> ToolUse | None:
        """What may or must be called; None for no call at all."""
        choice = self.tool_choice or "auto"
        if not self.tools or choice == "none":
            return None
        schemas = {tool.function.name: tool.function.parameters or {} for tool in self.tools}
        only_one = self.parallel_tool_calls is False
        strict = any(tool.function.strict for tool in self.tools)
        if isinstance(choice, NamedTool):
            name = choice.function.name
            return ToolUse(functions={name: schemas[name]}, mode="named", only_one=True)
        if isinstance(choice, AllowedToolsChoice):
            allowed = choice.allowed_tools
            functions = {tool.function.name: schemas[tool.function.name] for tool in allowed.tools}
            return ToolUse(functions=functions, mode=allowed.mode, only_one=only_one, strict=strict)
        return ToolUse(functions=schemas, mode=choice, only_one=only_one, strict=strict)

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools as templates take them; none where none may be called."""
        tools = self.tools or [] if self.tool_use is not None else []
        return [tool.model_dump(exclude_none=True) for tool in tools]

    def check_tools(self) -> None:
        """Rules over several fields. Raises BadRequest."""
        names = [tool.function.name for tool in self.tools or ()]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise BadRequest(f"tools[{index}]: there are two functions called {name}.", param="tools")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise BadRequest("tool_choice is only allowed when there are tools.", param="tool_choice")
        for name in _named(self.tool_choice):
            if name not in names:
                raise BadRequest(f"tool_choice names a function that is not in tools: {name}.", param="tool_choice")


def _named(choice: object) -> list[str]:
    if isinstance(choice, NamedTool):
        return [choice.function.name]
    if isinstance(choice, AllowedToolsChoice):
        return [tool.function.name for tool in choice.allowed_tools.tools]
    return []


def check_answers(messages: Sequence[Any]) -> None:
    """Every tool message answers a call of an earlier message. `messages` are `chat.Message`. Raises BadRequest."""
    known: set[str] = set()
    for index, message in enumerate(messages):
        ids = [call.id for call in message.tool_calls or ()]
        if len(set(ids)) < len(ids):
            where = f"messages[{index}].tool_calls"
            raise BadRequest(f"{where}: two calls have the same id.", param=where)
        known.update(ids)
        if message.role == "tool" and message.tool_call_id not in known:
            where = f"messages[{index}].tool_call_id"
            raise BadRequest(f"{where}: no earlier message has a tool call with this id.", param=where)
