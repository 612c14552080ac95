"""Which format a model writes tool calls in. Used by `server/prompt/build.py`; API process, once at start."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from server.tools import deepseek, harmony, hermes, kimi, llama, mistral, plain_json, xtml
from server.tools.forced import Wrap
from server.tools.glm import glm
from server.tools.qwen_coder import qwen_coder
from server.tools.reader import Format
from server.xtml import MARKS


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format by name."""

    read: Format
    wrap: Wrap | None
    """How a grammar writes a call; None where arguments are no JSON."""
    trigger: str = ""
    """What every call in that form begins with, and no other text; "" where other text may."""
    templates: tuple[tuple[str, ...], ...] = ()
    """Texts that a chat template of such a model holds: all those of one of the groups."""
    marks: tuple[str, ...] = ()
    """Marks that may be special tokens, which are no text otherwise."""


_DEEPSEEK = (deepseek.ALL_BEGIN, deepseek.ALL_END, deepseek.BEGIN, deepseek.SEPARATOR, deepseek.END)
_TAGS = ("<tool_call>", "</tool_call>")

FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "deepseek_v3": ToolFormat(
            read=deepseek.deepseek,
            wrap=deepseek.wrap_fenced,
            trigger=deepseek.ALL_BEGIN,
            templates=((deepseek.BEGIN, deepseek.FENCE),),
            marks=_DEEPSEEK,
        ),
        "deepseek_v31": ToolFormat(
            read=deepseek.deepseek,
            wrap=deepseek.wrap,
            trigger=deepseek.ALL_BEGIN,
            templates=((deepseek.BEGIN,),),
            marks=_DEEPSEEK,
        ),
        "kimi_k2": ToolFormat(
            read=kimi.kimi,
            wrap=kimi.wrap,
            trigger=kimi.ALL_BEGIN,
            templates=((kimi.BEGIN,),),
            marks=(kimi.ALL_BEGIN, kimi.ALL_END, kimi.BEGIN, kimi.SEPARATOR, kimi.END),
        ),
        "kimi_k3": ToolFormat(read=xtml.xtml, wrap=xtml.wrap, marks=MARKS.tokens),
        "harmony": ToolFormat(
            read=harmony.harmony,
            wrap=harmony.wrap,
            templates=(("<|channel|>commentary",),),
            marks=("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|end|>"),
        ),
        "mistral": ToolFormat(
            read=mistral.mistral,
            wrap=mistral.wrap,
            trigger=mistral.BEGIN,
            templates=((mistral.BEGIN,),),
            marks=(mistral.BEGIN, mistral.ID, mistral.ARGUMENTS),
        ),
        "qwen3_coder": ToolFormat(read=qwen_coder, wrap=None, templates=(("<function=",),), marks=_TAGS),
        "glm45": ToolFormat(
            read=glm,
            wrap=None,
            templates=(("<arg_key>",),),
            marks=(*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        "hermes": ToolFormat(
            read=hermes.hermes, wrap=hermes.wrap, trigger=hermes.BEGIN, templates=(("<tool_call>",),), marks=_TAGS
        ),
        "llama3_json": ToolFormat(
            read=llama.llama,
            wrap=llama.wrap,
            templates=((llama.TAG,), ("Environment: ipython",)),
            marks=(llama.TAG,),
        ),
        "json": ToolFormat(read=plain_json.plain_json, wrap=plain_json.wrap),
    }
)
"""Name -> format; the first that a template fits is its own. Names are vLLM's where it has one."""


def format_of(template: str, *, shows_tools: bool) -> ToolFormat:
    """The format that a chat template stands for; JSON where it names none, or would have to explain one that is no
    JSON."""

    def fits(format: ToolFormat) -> bool:
        return any(all(text in template for text in texts) for texts in format.templates)

    found = next(filter(fits, FORMATS.values()), FORMATS["json"])
    return found if shows_tools or found.wrap is not None else FORMATS["json"]
