"""What a request says about reasoning. Part of the schema of chat; API process."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from server.schema.common import INT32_MAX

SWITCHES = ("enable_thinking", "thinking")
"""What templates call a variable without which the model does not reason, where it is false."""


class ReasoningFields(BaseModel):
    """Parameters about reasoning; all but the first are for templates that know a variable for it."""

    include_reasoning: bool | None = Field(default=None, description="false: leave the reasoning out; default true")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0, le=INT32_MAX)

    def reasoning_variables(self, known: frozenset[str]) -> dict[str, Any]:
        """The variables of a template that knows those in `known`."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None and "reasoning_effort" in known:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            variables |= dict.fromkeys(known.intersection(SWITCHES), False)
        if self.thinking_token_budget is not None and "thinking_budget" in known:
            variables["thinking_budget"] = self.thinking_token_budget
        return variables

    def unhonoured_reasoning(self, known: frozenset[str]) -> dict[str, object]:
        """Those of the parameters that such a template takes no notice of."""
        variables = self.reasoning_variables(known)
        unhonoured: dict[str, object] = {}
        if self.reasoning_effort is not None and not variables.keys() - {"thinking_budget"}:
            unhonoured["reasoning_effort"] = self.reasoning_effort
        if self.thinking_token_budget is not None and "thinking_budget" not in variables:
            unhonoured["thinking_token_budget"] = self.thinking_token_budget
        return unhonoured
