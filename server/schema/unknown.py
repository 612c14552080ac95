"""Parameters that the schemas do not declare: which are harmless, which are refused, and which are named as ignored.

Used by `server/api`, and through it for every body; API process.
"""

import re

from server.errors import BadRequest

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Accepted silently: leaving them out changes nothing that the client would see."""

MUST_NOT_BE_IGNORED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "close_before_max_tokens": (),
    "documents": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": (),
    "grammar": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "logits_processors": (),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "regex": (),
    "skip_special_tokens": (True,),
    "structural_tag": (),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Name -> values that ask for nothing. Any other value would get wrong behaviour if it were ignored: 400."""

_INSTEAD = {"functions": "tools", "function_call": "tool_choice"}
"""What OpenAI had before, and what it has now."""

MAX_NAMED = 20
_PRINTABLE_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


def check_unknown(extra: dict[str, object], *, strict: bool) -> list[str]:
    """The names of parameters that are ignored, fit for a header. Raises BadRequest for one that must not be, and in
    strict mode for any."""
    ignored = []
    for name, value in extra.items():
        if value is None or name in HARMLESS:
            continue
        if name in MUST_NOT_BE_IGNORED:
            if not any(type(value) is type(neutral) and value == neutral for neutral in MUST_NOT_BE_IGNORED[name]):
                hint = f"; use {_INSTEAD[name]}" if name in _INSTEAD else " yet"
                raise BadRequest(f"{name} is not supported{hint}.", param=name)
            continue
        ignored.append(name if _PRINTABLE_NAME.fullmatch(name) else "(unprintable)")
    if ignored and strict:
        param = ignored[0]
        raise BadRequest(f"Unknown parameter: {param}.", param=param, code="unknown_parameter")
    return sorted(set(ignored))[:MAX_NAMED]


def ignored_header(ignored: list[str]) -> dict[str, str]:
    """The response header that names ignored parameters; none when there are none."""
    return {"x-ignored-params": ", ".join(ignored)} if ignored else {}
