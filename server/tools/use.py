"""What a request wants of tools, whichever API it came by. Made by the schemas, read by `server/output_forms.py` and
`server/tools/forced.py`; API process."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from server.tools.writer import Tools

Mode: TypeAlias = Literal["auto", "required", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Functions may be called (`auto`), one or more of them must be (`required`), or the only one must be (`named`)."""

    functions: Tools
    mode: Mode = "auto"
    only_one: bool = False
    """At most one call."""
    strict: bool = False
    """Arguments must follow their schema, also where no call is forced."""
