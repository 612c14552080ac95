"""Whether a grammar can be obeyed, and if not, why, in the words of whoever asked for it. Used by the checking process
(`worker.py`). Pure.
"""

import json
import re

from llguidance import LLTokenizer

from server.grammar.compiler import check_steps, compile_grammar
from server.grammar.errors import GrammarError
from server.grammar.frames import Verdict
from server.grammar.grammar import Grammar
from server.grammar.lark import output_grammar
from server.grammar.schema import check_schema
from server.grammar.vocabulary import Vocabulary

_OUR_PLACE = re.compile(r"^line \d+, column \d+: (?:failed to compile JSON schema: )?")
"""In a grammar that `output_grammar` made means nothing to whoever asked for something else."""


def verdict_on(grammar: Grammar, vocabulary: Vocabulary, trie: LLTokenizer) -> Verdict:
    """Everything that can be found out before an output begins."""
    try:
        _check_schemas(grammar)
        checked = output_grammar(grammar, vocabulary.special_literals())
        check_steps(compile_grammar(checked.source, trie), trie)
    except GrammarError as error:
        return Verdict(error=_in_their_words(str(error), grammar))
    return Verdict(grammar=checked)


def _in_their_words(error: str, grammar: Grammar) -> str:
    if grammar.kind == "grammar":
        return error
    message = _OUR_PLACE.sub("", error)
    if message.startswith("oneOf constraints"):
        return "oneOf is only supported where no output can match two of its schemas; use anyOf"
    return message


def _check_schemas(grammar: Grammar) -> None:
    if grammar.kind == "json_schema":
        check_schema(_parsed(grammar.text))
    elif grammar.kind == "calls":
        for call in json.loads(grammar.text)["calls"]:
            try:
                check_schema(call["schema"])
            except GrammarError as error:
                raise GrammarError(f"the parameters of {call['name']}: {error}") from None
        if grammar.answer is not None:
            _check_schemas(grammar.answer)
    elif grammar.kind == "structural_tag":
        for index, structure in enumerate(json.loads(grammar.text)["structures"]):
            try:
                check_schema(structure["schema"])
            except GrammarError as error:
                raise GrammarError(f"structures[{index}].schema: {error}") from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _parsed(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"not JSON: {error}") from None
