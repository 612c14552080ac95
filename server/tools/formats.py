"""Which format a model writes tool calls in. Used by `server/prompt/build.py`; API process, once at start."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from server.tools import deepseek, hermes, kimi, llama, mistral, plain_json
from server.tools.forced import Wrap
from server.tools.glm import glm
from server.tools.qwen_coder import qwen_coder
from server.tools.reader import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format by name."""

    read: Format
    wrap: Wrap | None
    """How a grammar writes a call; None where arguments are no JSON."""
    template_has: tuple[str, ...] = ()
    """Texts by any of which a chat template is known to be of models that write so."""
    marks: tuple[str, ...] = ()
    """Marks that may be special tokens, which are no text otherwise."""


FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "deepseek": ToolFormat(
            read=deepseek.deepseek,
            wrap=deepseek.wrap,
            template_has=(deepseek.BEGIN,),
            marks=(deepseek.ALL_BEGIN, deepseek.ALL_END, deepseek.BEGIN, deepseek.SEPARATOR, deepseek.END),
        ),
        "kimi_k2": ToolFormat(
            read=kimi.kimi,
            wrap=kimi.wrap,
            template_has=(kimi.BEGIN,),
            marks=(kimi.ALL_BEGIN, kimi.ALL_END, kimi.BEGIN, kimi.SEPARATOR, kimi.END),
        ),
        "mistral": ToolFormat(
            read=mistral.mistral,
            wrap=mistral.wrap,
            template_has=(mistral.BEGIN,),
            marks=(mistral.BEGIN, mistral.ID, mistral.ARGUMENTS),
        ),
        "qwen3_coder": ToolFormat(
            read=qwen_coder, wrap=None, template_has=("<function=",), marks=("<tool_call>", "</tool_call>")
        ),
        "glm45": ToolFormat(
            read=glm,
            wrap=None,
            template_has=("<arg_key>",),
            marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        "hermes": ToolFormat(
            read=hermes.hermes, wrap=hermes.wrap, template_has=("<tool_call>",), marks=("<tool_call>", "</tool_call>")
        ),
        "llama3_json": ToolFormat(
            read=llama.llama, wrap=llama.wrap, template_has=(llama.TAG, "Environment: ipython"), marks=(llama.TAG,)
        ),
        "json": ToolFormat(read=plain_json.plain_json, wrap=plain_json.wrap),
    }
)
"""Name -> format; the first that a template fits is its own. Names are vLLM's where it has one."""


def format_of(template: str) -> str:
    """The name of the format that a chat template stands for; `json` where it names none."""
    fits = (name for name, format in FORMATS.items() if any(text in template for text in format.template_has))
    return next(fits, "json")
