"""From what a request asks for to a grammar in Lark's notation, as the grammar library reads it. Pure; any process.

JSON comes out on one line or indented, never with more than `_SPACE` between two signs.
"""

import json
from collections.abc import Mapping

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from server.grammar.errors import GrammarError
from server.grammar.grammar import Grammar

Json = dict[str, object]

OPTIONS = '%llguidance {"no_forcing": true}'
"""Forced text is left to the model, which spells it in tokens of its own."""
_SPACE = r" |\n[ \t]{0,16}"
"""The most white space that may stand between two signs of JSON."""
_ANY_TEXT = "TEXT: /(?s:.)*/"
_JSON = "start: %json "


def is_json(lark: str) -> bool:
    """Whether the whole output is JSON."""
    return lark.startswith(_JSON)


def lark_of(grammar: Grammar, specials: Mapping[str, int]) -> str:
    """`specials` are the special tokens by their spelling. Raises GrammarError for a text that is not of its kind;
    what it means is seen when it is compiled."""
    return f"{_rules(grammar, specials)}\n{OPTIONS}"


def _rules(grammar: Grammar, specials: Mapping[str, int]) -> str:
    match grammar.kind:
        case "json_object":
            return f"{_JSON}{_bounded({'type': 'object'})}"
        case "json_schema":
            return f"{_JSON}{_bounded(json.loads(grammar.text))}"
        case "regex":
            return f"start: /{regex_to_lark(grammar.text, 'd')}/"
        case "choice":
            return "start: " + " | ".join(_literal(choice, specials) for choice in json.loads(grammar.text))
        case "grammar":
            return _user_grammar(grammar.text)
        case "structural_tag":
            return _tags(json.loads(grammar.text), specials)


def _bounded(schema: Json) -> str:
    """The schema, with what it leaves open."""
    return json.dumps(schema | {"x-guidance": {"whitespace_pattern": _SPACE}})


def _literal(text: str, specials: Mapping[str, int]) -> str:
    """The rule for a text. Special tokens in it are tokens: that is how models write them."""
    items, start = [], 0
    while start < len(text):
        found = [(text.find(special, start), -len(special), token) for special, token in specials.items() if special]
        position, length, token = min((hit for hit in found if hit[0] >= 0), default=(len(text), 0, -1))
        if position > start:
            items.append(json.dumps(text[start:position]).replace("\x7f", "\\u007f"))
        if token >= 0:
            items.append(f"<[{token}]>")
        start = position - length
    return " ".join(items) or '""'


def _user_grammar(text: str) -> str:
    """Lark, or the EBNF of llama.cpp, which is translated."""
    if "%llguidance" in text:
        raise GrammarError("%llguidance may not be used")
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the library's translator raises no narrower one
        raise GrammarError(str(error)) from error


def _tags(tags: Json, specials: Mapping[str, int]) -> str:
    """Free text, in which whatever begins with a trigger is one of the structures."""
    triggers, structures = tags["triggers"], tags["structures"]
    assert isinstance(triggers, list) and isinstance(structures, list), "checked when the request was read"
    rules, names = [_ANY_TEXT], []
    for index, structure in enumerate(structures):
        begin, end, schema = structure["begin"], structure["end"], structure["schema"]
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise GrammarError(f"structures[{index}].begin starts with none of the triggers")
        rest = _literal(begin[len(trigger) :], specials) if begin != trigger else ""
        closing = _literal(end, specials) if end else ""
        rules += _trigger_rules(index, trigger, specials)
        rules.append(f"tag_{index}: trigger_{index} {rest} %json {_bounded(schema)} {closing}")
        names.append(f"tag_{index}")
    return "\n".join([f"start: ({' | '.join(names)})* TEXT", *rules])


def _trigger_rules(index: int, trigger: str, specials: Mapping[str, int]) -> list[str]:
    if trigger in specials:
        return [f"trigger_{index}: TEXT <[{specials[trigger]}]>"]
    return [f"trigger_{index}[lazy]: TEXT {_literal(trigger, {})}"]
