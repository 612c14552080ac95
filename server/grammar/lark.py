"""From what a request asks for to grammars in the library's notation, which is much like Lark's. Pure; any process.

JSON comes out on one line or indented, never with more than `_SPACE` between two signs.
"""

import json
import re
from collections.abc import Mapping

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from scheduler.request import OutputGrammar
from server.grammar.errors import GrammarError
from server.grammar.grammar import Grammar
from server.reasoning import ReasoningMarks

Json = dict[str, object]

_OPTIONS = '%llguidance {"no_forcing": true}'
"""Forced text is left to the model, which spells it in tokens of its own."""
_SPACE = r" |\n[ \t]{0,16}"
"""The most white space that may stand between two signs of JSON."""
_ANY_TEXT = "TEXT: /(?s:.)*/"
MAX_CALLS = 16
"""Of an output whose calls are written by a grammar: weak models repeat themselves for ever."""
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_TEMPERATURE = re.compile(r"^\s*[?!]?([\w-]+)\s*\[[^\]]*\btemperature\s*=", re.MULTILINE)
_JSON_SIGN = re.compile(r'"[^"]*"|[{:, ]')
_GAP = r"GAP: /[ \n]{1,4}/"
"""Between reasoning and answer."""


def output_grammar(grammar: Grammar, specials: Mapping[str, int]) -> OutputGrammar:
    """`specials` are the special tokens by their spelling. Raises GrammarError for a text that is not of its kind;
    what it means is seen when it is compiled."""
    before = _before_answer(grammar, specials)
    parts = {"output": _rules(grammar, specials, before)}
    if grammar.reasoning is not None:
        opened = "" if grammar.kind == "calls" else before
        parts = {"reasoning": _reasoning(grammar.reasoning, grammar.is_reasoning, opened, specials)} | parts
    if grammar.answer is not None:
        parts["answer"] = f"start: {before} @text" if before else _rules(grammar.answer, specials)
        parts |= {"text": _rules(grammar.answer, specials)} if before else {}
    first = next(iter(parts))
    parts[first] += f"\n{_OPTIONS}"
    mark = "" if grammar.reasoning is None else grammar.reasoning.answer or grammar.reasoning.end
    begins = _json_begins(grammar)
    return OutputGrammar(
        source=json.dumps({"grammars": [{"name": name, "lark_grammar": part} for name, part in parts.items()]}),
        json_after=mark if begins or _is_json(grammar) else None,
        json_begins=begins,
    )


def _is_json(grammar: Grammar) -> bool:
    """Whether all of it is JSON, calls included: what stands around their arguments has quotation marks in pairs."""
    if grammar.kind == "calls":
        return grammar.answer is None or _is_json(grammar.answer)
    return grammar.kind in ("json_object", "json_schema")


def _json_begins(grammar: Grammar) -> tuple[str, ...]:
    """What stands before JSON where other text may stand too."""
    if grammar.kind not in ("structural_tag", "calls") or _is_json(grammar):
        return ()
    structures = json.loads(grammar.text)["calls" if grammar.kind == "calls" else "structures"]
    answer = () if grammar.answer is None else _json_begins(grammar.answer)
    return (*dict.fromkeys(structure["begin"] for structure in structures), *answer)


def _before_answer(grammar: Grammar, specials: Mapping[str, int]) -> str:
    """What stands before an answer in any case, behind reasoning if there is any."""
    marks = grammar.reasoning
    if marks is None or not marks.answer or (marks.closers and not grammar.is_reasoning):  # the prompt has it
        return ""
    return _literal(marks.answer, specials)


def _rules(grammar: Grammar, specials: Mapping[str, int], before: str = "") -> str:
    """`before` stands before an answer."""
    match grammar.kind:
        case "json_object":
            return f"start: {_json({'type': 'object'})}"
        case "json_schema":
            return f"start: {_json(json.loads(grammar.text))}"
        case "regex":
            return f"start: /{regex_to_lark(grammar.text, 'd')}/"
        case "choice":
            return "start: " + " | ".join(_literal(choice, specials) for choice in json.loads(grammar.text))
        case "grammar":
            return _user_grammar(grammar.text)
        case "structural_tag":
            return _tags(json.loads(grammar.text), specials)
        case "calls":
            closers = () if grammar.reasoning is None else grammar.reasoning.closers
            empty = f"{before} {_literal(closers[0], specials)}" if closers else ""
            return _calls(json.loads(grammar.text), grammar.answer is not None, empty, specials)


def _json(schema: Json) -> str:
    """JSON of the schema, with bounds for what it leaves open."""
    return "%json " + json.dumps(schema | {"x-guidance": {"whitespace_pattern": _SPACE}})


def _literal(text: str, specials: Mapping[str, int]) -> str:
    """A text. Special tokens in it are tokens: that is how models write them."""
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
    if not _GBNF_RULE.search(text):
        if found := _TEMPERATURE.search(text):
            raise GrammarError(f"rule {found[1]!r}: temperature is not supported here; the request has one of its own")
        return text
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the library's translator raises no narrower one
        raise GrammarError(str(error)) from error


def _reasoning(marks: ReasoningMarks, is_reasoning: bool, before: str, specials: Mapping[str, int]) -> str:
    """What comes before the answer: reasoning, if there is any, and what stands before an answer in any case; and what
    may come behind it."""
    behind = " ".join(f"({_literal(mark, specials)})?" for mark in marks.closers)
    if marks.closers and not is_reasoning:
        return f"start: @output {behind}"
    opened = "thought GAP?" if is_reasoning else f"({_literal(marks.begin, specials)} thought GAP?)?"
    start = f"start: {opened} {before} @output {behind}"
    return "\n".join([start, _up_to("thought", marks.end, specials), _ANY_TEXT, _GAP])


def _up_to(rule: str, mark: str, specials: Mapping[str, int]) -> str:
    """Any text that ends with the first mark."""
    if any(special and mark.startswith(special) for special in specials):
        return f"{rule}: TEXT {_literal(mark, specials)}"
    return f"{rule}[lazy]: TEXT {_literal(mark, {})}"


def _tags(tags: Json, specials: Mapping[str, int]) -> str:
    """Free text, in which whatever begins with a trigger is one of the structures."""
    triggers, structures = tags["triggers"], tags["structures"]
    assert isinstance(triggers, list) and isinstance(structures, list), "checked when the request was read"
    rules, names = [_ANY_TEXT], []
    for index, structure in enumerate(structures):
        begin, end = structure["begin"], structure["end"]
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise GrammarError(f"structures[{index}].begin starts with none of the triggers")
        rest = _literal(begin[len(trigger) :], specials) if begin != trigger else ""
        closing = _literal(end, specials) if end else ""
        rules.append(_up_to(f"trigger_{index}", trigger, specials))
        rules.append(f"tag_{index}: trigger_{index} {rest} {_json(structure['schema'])} {closing}")
        names.append(f"tag_{index}")
    return "\n".join([f"start: ({' | '.join(names)})* TEXT", *rules])


def _calls(calls: Json, has_answer: bool, before: str, specials: Mapping[str, int]) -> str:
    """Calls and white space between them, with what stands before the first; or an answer."""
    structures = calls["calls"]
    assert isinstance(structures, list), "made by `server/tools/forced.py`"
    rules = [r"GAP: /[ \n]{1,2}/"]
    for index, call in enumerate(structures):
        begin, end = _call_begin(call["begin"], specials), _literal(call["end"], specials)
        rules.append(f"call_{index}: {begin} {_json(call['schema'])} {end}")
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(structures))))
    more = "" if calls["only_one"] else f" (GAP? call){{0,{MAX_CALLS - 1}}}"
    return "\n".join([f"start: {before} call{more}{' | @answer' if has_answer else ''}", *rules])


def _call_begin(text: str, specials: Mapping[str, int]) -> str:
    """What stands before a call's arguments. Where that is JSON, an answer might begin so too: the library can follow
    both only while they consist of the same signs."""
    if not text.startswith("{"):
        return _literal(text, specials)
    signs = _JSON_SIGN.findall(text)
    return " ".join('" "?' if sign == " " else _literal(sign, {}) for sign in signs)
