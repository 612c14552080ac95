"""What outputs with a grammar may say: every kind of grammar, bounds, drafts, reasoning, many sequences."""

import json
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from llguidance import LLParserLimits

from scheduler.masks import MaskRow
from server.grammar.digits import MAX_DIGITS
from server.grammar.errors import GrammarError
from server.grammar.follower import MAX_RESTARTS
from server.grammar.grammar import Grammar
from server.grammar.matchers import MAX_COMPILED, Matchers
from server.grammar.schema import MAX_OPTIONAL
from server.grammar.verdicts import verdict_on
from server.prompt.tokenizer import load_tokenizer
from server.prompt.vocabulary import vocabulary_of
from server.reasoning import ReasoningMarks
from tests.server.fakes import EOS, TOKENIZER, LocalChecker, make_tokenizer
from tests.server.grammar_case import NO_DRAFTS, PROMPT, Writer, fits, request_for, wait
from tests.server.tiny_tokenizers import CHATML_SPECIALS, save_folder, sentencepiece_bpe, trained_bpe

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "string"}}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
TAGS = json.dumps(
    {
        "structures": [{"begin": "<f=x>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f"],
    }
)


@pytest.mark.parametrize(
    ("kind", "text", "output", "expected"),
    [
        ("json_object", "", '{"a": [1, {"b": null}]}', True),
        ("json_object", "", "[1]", False),
        ("json_schema", SCHEMA, '{"a":1,"b":["x","é😀\\n"]}', True),
        ("json_schema", SCHEMA, '{\n  "a": 1,\n  "b": [\n    "x"\n  ]\n}', True),
        ("json_schema", SCHEMA, '{"b":[],"a":1}', False),
        ("json_schema", SCHEMA, '{"a":1.5,"b":[]}', False),
        ("json_schema", SCHEMA, '{"a":1,"b":[],"c":2}', False),
        ("json_schema", SCHEMA, '{"a":1,"b":[', False),
        ("json_schema", SCHEMA, '{"a":  1,"b":[]}', False),
        ("json_schema", SCHEMA, '{"a":\n\n1,"b":[]}', False),
        ("json_schema", SCHEMA, '{"a":1,"b":["\\ud800"]}', False),
        ("json_schema", "{}", "-1.5e+3", True),
        ("json_schema", '{"enum":[9007199254740992,9223372036854775807]}', "9223372036854775807", True),
        ("json_schema", '{"const":"\\u0001/"}', '"\\u0001/"', True),
        ("regex", r"\d{3}-[a-z]/", "123-x/", True),
        ("regex", r"^\d{3}$", "1234", False),
        ("regex", "a\nb|é", "a\nb", True),
        ("choice", '["yes","no","é\\"/\\n"]', 'é"/\n', True),
        ("choice", '["yes","no"]', "ye", False),
        ("choice", '["a<|im_start|>b"]', "a<|im_start|>b", True),
        ("grammar", 'start: "a" b*\nb: "c" | /[0-9]+/', "ac12c", True),
        ("grammar", 'start[capture]: num "x"\nnum[lazy]: /[0-9]+;/', "1;x", True),
        ("grammar", "root ::= item+\nitem ::= [a-c]", "ab", True),
        ("grammar", 'root ::= "yes" | [0-9]+', "42", True),
        ("grammar", 'root ::= "yes" | [0-9]+', "yes1", False),
        ("structural_tag", TAGS, "hm <f=x>12</f> and <f=x>3</f>.", True),
        ("structural_tag", TAGS, "no calls < f", True),
        ("structural_tag", TAGS, "hm <f=y>", False),
        ("structural_tag", TAGS, "hm <f=x>1", False),
    ],
)
def test_outputs_of_every_kind(kind: str, text: str, output: str, expected: bool) -> None:
    assert fits(kind, text, output) is expected


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "ab[.*", "at character 2 of a regular expression: unclosed character class"),
        ("regex", "(?<=a)b", "at character 0 of a regular expression: look-around"),
        ("regex", "(" * 300 + ")" * 300, "at character 250 of a regular expression: exceed the maximum number"),
        ("grammar", "start: a\nb: /[/", "line 1, column 8: unknown name"),
        ("grammar", "start: a\na: /[/", "line 2, column 4: at character 0 of a regular expression: unclosed"),
        ("grammar", 'start: start "a"', "nothing matches it"),
        ("grammar", 'begin: "a"', "no start rule found"),
        ("grammar", 'start[capture]: "a', "line 1, column 19: lexer error"),
        ("grammar", "start: a\na[temperature=0.5]: /x/", "rule 'a': temperature is not supported here"),
        ("grammar", '%llguidance {}\nstart: "a"', "%llguidance may not be used"),
        ("grammar", "root ::= foo", "Rule 'foo' not found"),
        ("grammar", "root ::= (", "Expected ')'"),
        ("json_schema", "{", "not JSON: "),
        ("json_schema", "[" * 100_000, "not JSON: "),
        ("json_schema", '{"const":NaN}', "not JSON: NaN is no number"),
        ("json_schema", '{"type":"string","minLength":5,"maxLength":2}', "Unsatisfiable schema: minLength (5)"),
        ("json_schema", '{"type":"string","pattern":"a("}', "at character 1 of a regular expression: unclosed group"),
        ("json_schema", '{"oneOf":[{"type":"string"},{"minLength":3}]}', "oneOf is only supported where no output"),
        ("structural_tag", TAGS.replace('"<f"', '"<g"'), "structures[0].begin starts with none of the triggers"),
        ("structural_tag", TAGS.replace("integer", "int"), "structures[0].schema: at #: there is no type 'int'"),
    ],
)
def test_faults_are_named_with_their_place(kind: Any, text: str, message: str) -> None:
    checker = LocalChecker()
    verdict = verdict_on(Grammar(kind=kind, text=text), checker.vocabulary, checker.trie)
    assert verdict.grammar is None
    assert verdict.error.startswith(message)


OPTIONAL = [{"type": "object", "properties": {f"{name}{n}": {} for n in range(MAX_OPTIONAL)}} for name in "abcdef"]


def test_what_would_fail_after_some_tokens_is_refused() -> None:
    """Each of them is fine; together they have more continuations after a property than the library follows."""
    checker = LocalChecker()
    for schema, fine in ((OPTIONAL[0], True), ({"anyOf": OPTIONAL}, False)):
        verdict = verdict_on(Grammar(kind="json_schema", text=json.dumps(schema)), checker.vocabulary, checker.trie)
        assert (verdict.grammar is not None) is fine
        assert fine or verdict.error.startswith("at some place of an output too much may follow")


def test_white_space_and_digits_are_bounded() -> None:
    assert Writer("json_schema", "{}").write("[" + " " * 50) == "[ "
    assert Writer("json_schema", "{}").write("[\n" + " " * 50) == "[\n" + " " * 16
    numbers = ("1" * 99, "-0." + "1" * 99, "9" * 30 + "." + "9" * 99)
    for schema, number in product(("{}", '{"type":"number"}'), numbers):
        writer = Writer("json_schema", schema)
        written = writer.write(number)
        assert sum(sign.isdigit() for sign in written) == MAX_DIGITS
        assert writer.ends
    writer = Writer("json_schema", '{"type":"number"}')
    assert writer.write("1" * MAX_DIGITS + ".5e+77").endswith(".5e+7")


def test_drafts_are_taken_back() -> None:
    writer = Writer("json_schema", SCHEMA)
    assert writer.write('{"a":') == '{"a":'
    before = writer.allowed()
    assert writer.allowed(writer.ids('1,"b"')) == set(writer.ids(": \n"))
    assert writer.allowed(writer.ids('1,"b":[]}')) == {EOS}
    assert writer.allowed(writer.ids('1,"b":[]}<|im_end|>')) == set()
    assert writer.allowed(writer.ids("x")) == set(), "the row after a draft that is not allowed"
    assert writer.allowed() == before
    assert writer.write('1,"b":[]}') == '1,"b":[]}'
    assert writer.ends


THINK = ReasoningMarks(begin="<think>", end="</think>")


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_may_come_first(special: bool) -> None:
    tokenizer = make_tokenizer("<think>", "</think>") if special else TOKENIZER
    for is_reasoning, output, expected in [
        (False, '<think>Is it "x?</think>\n\n{"a":1,"b":[]}', True),
        (False, '{"a":1,"b":[]}', True),
        (False, "Is it x?", False),
        (True, 'Is it "x?</think>{"a":1,"b":[]}', True),
        (True, '{"a":1,"b":[]}', False),
        (True, "x</think>x", False),
    ]:
        writer = Writer("json_schema", SCHEMA, tokenizer, reasoning=THINK, is_reasoning=is_reasoning)
        assert (writer.write(output) == output and writer.ends) is expected, output
    writer = Writer("json_schema", "{}", tokenizer, reasoning=THINK, is_reasoning=True)
    assert writer.write('"</think>' + "1" * 99) == '"</think>' + "1" * MAX_DIGITS


@pytest.mark.parametrize("special", [False, True])
def test_drafts_may_cross_the_beginning_of_the_answer(special: bool) -> None:
    """Wherever they begin and end, masks behind them are those of an output that they were part of."""
    tokenizer = make_tokenizer("<think>", "</think>") if special else TOKENIZER
    text = '<think>Is it "x?</think>\n{"a":1,"b":["y"]}'
    plain, drafted = (Writer("json_schema", SCHEMA, tokenizer, reasoning=THINK) for _ in range(2))
    ids = plain.ids(text)
    masks = []
    for token in ids:
        masks.append(plain.allowed())
        plain.tokens.append(token)
    for position, token in enumerate(ids):
        for count in (0, 1, 3, 8):
            end = min(position + count, len(ids) - 1)
            assert drafted.allowed(ids[position:end]) == masks[end], (position, count)
        drafted.tokens.append(token)
    assert drafted.ends


def test_sequences_follow_their_own_grammars_and_are_forgotten() -> None:
    checker = LocalChecker()
    matchers = Matchers(lambda: checker.vocabulary)
    for seq_id, choice in enumerate(["a", "b", "a"]):
        matchers.prepare(request_for(seq_id, Grammar(kind="choice", text=f'["{choice}"]'), checker))
    matchers.prepare(request_for(9, Grammar(kind="choice", text='["c"]'), checker))
    matchers.forget(9)
    assert sorted(request.seq_id for request in wait(matchers)) == [0, 1, 2]
    rows = [MaskRow(seq_id, PROMPT, len(PROMPT), NO_DRAFTS) for seq_id in range(3)]
    words = matchers.next_tokens(rows)
    masks = [words[start : start + len(words) // 3] for start in range(0, len(words), len(words) // 3)]
    assert masks == [matchers.next_tokens([row]) for row in rows]
    assert masks[0] == masks[2] != masks[1]
    for seq_id in range(3):
        matchers.forget(seq_id)
    assert not matchers._followers
    assert not matchers.busy


def test_few_compiled_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = LocalChecker()
    matchers = Matchers(lambda: checker.vocabulary)
    for seq_id in range(MAX_COMPILED + 1):
        matchers.prepare(request_for(seq_id, Grammar(kind="choice", text=f'["{seq_id}"]'), checker))
    assert len(matchers._compiled) == MAX_COMPILED
    monkeypatch.setattr("server.grammar.matchers.MAX_COMPILED_CHARS", 300)
    matchers.prepare(request_for(99, Grammar(kind="choice", text='["x"]'), checker))
    assert 1 <= len(matchers._compiled) <= 3
    assert len(wait(matchers)) == MAX_COMPILED + 2


def test_a_model_without_an_end_has_no_grammars() -> None:
    with pytest.raises(GrammarError, match="no token that ends an output"):
        vocabulary_of(TOKENIZER, TOKENIZER.vocab_size, ())


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "legacy sentencepiece"])
def test_tokens_are_allowed_by_their_bytes(tmp_path: Path, kind: str) -> None:
    """Whatever a vocabulary spells: merges, bytes, spaces of SentencePiece, two tokens of the same bytes."""
    fast = trained_bpe(CHATML_SPECIALS) if kind == "byte-level" else sentencepiece_bpe(legacy="legacy" in kind)
    tokenizer = load_tokenizer(save_folder(tmp_path, fast, {}))
    writer = Writer("choice", '["the é the{"]', tokenizer)
    text, count = b"the \xc3\xa9 the{", 0
    while count < len(text):
        rest = text[count:]
        expected = {
            token
            for token in range(tokenizer.vocab_size)
            if not tokenizer.is_special(token) and rest.startswith(tokenizer.token_bytes(token) or b"\0")
        }
        assert writer.allowed() == expected
        longest = max(expected, key=lambda token: len(tokenizer.token_bytes(token)))
        writer.tokens.append(longest)
        count += len(tokenizer.token_bytes(longest))
    assert writer.allowed() == {EOS}


def test_a_grammar_that_becomes_too_complex_does_not_end_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library lets an output end where it has failed."""
    monkeypatch.setattr("server.grammar.compiler.LIMITS", LLParserLimits(max_lexer_states=40, verbose_errors=False))
    writer = Writer("regex", "(?:.*(?:a|e).{12}){4}")
    assert 0 < len(writer.write("".join(Random(0).choices("aexy", k=400)))) < 400
    assert writer.allowed() == set()
    assert writer.allowed() == set(), "and stays so"


@pytest.mark.parametrize("restarts", [0, MAX_RESTARTS])
def test_drafts_and_other_outputs_make_no_grammar_fail(monkeypatch: pytest.MonkeyPatch, restarts: int) -> None:
    """The library counts the states of all outputs of a grammar together, and those of drafts."""
    monkeypatch.setattr("server.grammar.compiler.LIMITS", LLParserLimits(max_lexer_states=200, verbose_errors=False))
    monkeypatch.setattr("server.grammar.follower.MAX_RESTARTS", restarts)
    source = "regex", "(?:.*(?:a|e).{12}){4}"
    text = "".join(Random(0).choices("aexy", k=40))
    writer = Writer(*source)
    assert writer.write(text[:10])
    drafts = writer.ids(text[10:])
    rows = [writer.allowed(drafts[:count]) for count in range(10)]
    assert (writer.allowed() == rows[0]) is bool(restarts)
    writer.matchers.prepare(request_for(2, Grammar(kind="regex", text=source[1]), LocalChecker()))
    wait(writer.matchers)
    row = MaskRow(2, PROMPT, len(PROMPT), NO_DRAFTS)
    assert any(writer.matchers.next_tokens([row])) is bool(restarts)
