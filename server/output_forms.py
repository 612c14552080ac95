"""How the outputs of the served model are read: its marks of reasoning and its format of tool calls. API process.

Made once by `server/app.py`; `server/api/conversation.py` asks it for each request.
"""

from collections.abc import Iterable
from dataclasses import replace

from server.grammar.grammar import Grammar
from server.output import OutputForm
from server.prompt.build import PromptBuilder
from server.prompt.tokenizer import Tokenizer
from server.tools.forced import calls_grammar, strict_grammar
from server.tools.formats import FORMATS
from server.tools.use import ToolUse

_JSON = FORMATS["json"]


class OutputForms:
    """Of one model. Immutable."""

    def __init__(self, prompts: PromptBuilder) -> None:
        self._marks, self._format = prompts.reasoning, prompts.tool_format
        marks = () if self._marks is None else self._marks.tokens or (self._marks.begin, self._marks.end)
        self._reasoning_ids = _special(prompts.tokenizer, marks)
        self._tool_ids = _special(prompts.tokenizer, self._format.marks)

    @property
    def follows_schemas(self) -> bool:
        """Whether calls that are not forced can be made to follow their schemas."""
        return bool(self._format.trigger)

    def of(
        self, tools: ToolUse | None, grammar: Grammar | None, *, is_reasoning: bool, shows_reasoning: bool
    ) -> tuple[OutputForm, Grammar | None]:
        """For the outputs of one request: how they are read, and the grammar that they must follow, which is `grammar`
        made to suit the model's reasoning and the calls that may or must come."""
        format = self._format
        if tools is not None and (grammar is not None or tools.mode != "auto"):
            format = format if format.wrap is not None else _JSON
            assert format.wrap is not None
            grammar = calls_grammar(tools, format.wrap, grammar)
        elif tools is not None and tools.strict and format.wrap is not None and self.follows_schemas:
            grammar = strict_grammar(tools, format.wrap, format.trigger)
        if grammar is not None:
            grammar = replace(grammar, reasoning=self._marks, is_reasoning=is_reasoning)
        form = OutputForm(
            reasoning=self._marks,
            is_reasoning=is_reasoning,
            shows_reasoning=shows_reasoning,
            markup_ids=self._reasoning_ids | (self._tool_ids if tools is not None else frozenset()),
            tools=tools,
            format=format.read,
        )
        return form, grammar


def _special(tokenizer: Tokenizer, marks: Iterable[str]) -> frozenset[int]:
    ids = map(tokenizer.id_of, marks)
    return frozenset(token_id for token_id in ids if token_id is not None and tokenizer.is_special(token_id))
