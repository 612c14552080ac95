"""Numbers in JSON end, wherever in an output JSON stands; digits elsewhere are as many as the grammar lets through."""

import json

import pytest

from server.grammar.digits import MAX_DIGITS, DigitLimit, JsonPlaces, digits_at_end
from server.grammar.grammar import Grammar
from server.output_forms import OutputForms
from server.prompt.build import PromptBuilder
from server.tools.use import ToolUse
from tests.server.fakes import EOS, TOKENIZER
from tests.server.grammar_case import Writer, fits

LONG = "1" * 99
TAGS = {
    "structures": [
        {"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"},
        {"begin": "<o>", "schema": {"type": "object"}, "end": ""},
    ],
    "triggers": ["<"],
}


def test_digits_of_strings_and_forced_digits_are_not_bounded() -> None:
    assert fits("json_schema", '{"type":"string"}', '"\\"' + "1" * 99 + '"')
    limit = DigitLimit([b"1", b"a", b"", b"2b"])
    assert limit.shorten(b"\x0f") == b"\x06"
    assert limit.shorten(b"\x09") == b"\x09"


def test_digits_of_drafts_count() -> None:
    writer = Writer("json_schema", '{"type":"integer"}')
    assert writer.write("1" * (MAX_DIGITS - 2))
    assert set(writer.ids("7")) < writer.allowed(writer.ids("1"))
    assert writer.allowed(writer.ids("11")) == {EOS}
    assert set(writer.ids("7")) < writer.allowed()


@pytest.mark.parametrize(
    ("text", "expected"),
    [(b"", 0), (b"12", 2), (b'": -1.5e+7', 3), (b"12 ", 0), (b"1,23", 2), (b"9" * 300, 256), (b"{", 0)],
)
def test_digits_at_the_end(text: bytes, expected: int) -> None:
    assert digits_at_end(text) == expected


@pytest.mark.parametrize(
    ("after", "begins", "text", "expected"),
    [
        ("", (), '{"a": 1', True),
        ("", (), '{"a": "1', False),
        ("", (), '{"a\\\\": 1', True),
        ("", (), '{"a\\": 1', False),
        ("</t>", (), 'odd " 12</t>{"a": 1', True),
        ("</t>", (), 'x</t>{"a": "</t>1', False),
        ("", ("<n>", "<o>"), "12 <o", False),
        ("", ("<n>", "<o>"), "a <n>1", True),
        ("", ("<n>", "<o>"), "a <n> -1", True),
        ("", ("<n>", "<o>"), "a <n>1</n> 1", False),
        ("", ("<n>", "<o>"), 'a <n>1</n> <o>{"a]": [1], "b": 1', True),
        ("", ("<n>", "<o>"), 'a <o>{"a": [1], "b": "1', False),
        ("", ("<n>", "<o>"), 'a <o>{"a": [1]} 1', False),
        ("", ("<n>", "<o>"), 'a <o>"x" 1', False),
        ("", ("<n>",), 'a <n>"x<n>1', False),
        ("", ('{"name": "f", "parameters": ',), '{"name":"f","parameters":1', True),
    ],
)
def test_where_json_is(after: str, begins: tuple[str, ...], text: str, expected: bool) -> None:
    assert JsonPlaces(after, begins).ends_in_json(text.encode()) is expected


def _digits(written: str) -> int:
    return sum(sign.isdigit() for sign in written)


def test_digits_are_bounded_within_tags_and_free_around_them() -> None:
    writer = Writer("structural_tag", json.dumps(TAGS))
    around = f"see {LONG} <n>"
    assert writer.write(around + LONG) == around + "1" * MAX_DIGITS
    assert writer.write("</n>" + LONG + '<o>{"a": "' + LONG + '", "b": 0.' + LONG).endswith(
        "0." + "1" * (MAX_DIGITS - 1)
    )


def test_digits_are_bounded_in_strict_calls() -> None:
    forms = OutputForms(PromptBuilder(TOKENIZER, tool_parser="hermes"))
    functions = {"f": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    for answer, begin in ((None, "no " + LONG), (Grammar(kind="regex", text="[0-9]*"), "")):
        use = ToolUse(functions=functions, strict=answer is None)
        grammar = forms.of(use, answer, is_reasoning=False, shows_reasoning=True)[1]
        assert grammar is not None
        writer = Writer(grammar.kind, grammar.text, answer=grammar.answer)
        call = begin + '<tool_call>\n{"name": "f", "arguments": {"n": '
        assert writer.write(call + LONG) == call + "1" * MAX_DIGITS, grammar.kind
    assert fits("regex", "[0-9]*", LONG), "what a user wrote holds"
