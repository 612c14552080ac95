"""Calls that a grammar makes any model write: what it lets through is what the parsers read, after reasoning too."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from server.errors import BadRequest
from server.grammar.compiler import compile_grammar
from server.grammar.grammar import Grammar
from server.grammar.lark import MAX_CALLS
from server.output_forms import OutputForms
from server.prompt.build import PromptBuilder
from server.prompt.tokenizer import Tokenizer
from server.reasoning import ReasoningMarks
from server.tools.formats import FORMATS
from server.tools.reader import ToolReader
from server.tools.use import ToolUse
from tests.server.exchange import chat
from tests.server.fakes import FakeEngine, LocalChecker, make_app, make_tokenizer, says

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer"}},
    "required": ["city"],
    "$defs": {"name": {"type": "string"}},
}
USE = ToolUse(functions={"get_weather": SCHEMA, "now": {}}, mode="required")
MARKS = [mark for format in FORMATS.values() for mark in format.marks]
SPECIAL = make_tokenizer("[THINK]", "[/THINK]", *dict.fromkeys(MARKS), template="[/THINK]{{ tools }}")
PLAIN = make_tokenizer(template="</think>{{ tools }}")
ANSWER = Grammar(
    kind="json_schema", text='{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
)
WRAPPED = [name for name, format in FORMATS.items() if format.wrap is not None]


class Follower:
    """Which texts a grammar takes."""

    def __init__(self, tokenizer: Tokenizer, grammar: Grammar | None) -> None:
        assert grammar is not None
        checker = LocalChecker(tokenizer)
        self.tokenizer = tokenizer
        self.grammar = asyncio.run(checker.check(grammar))
        self.start = compile_grammar(self.grammar.source, checker.trie)

    def takes(self, text: str) -> bool:
        """All of it, and it may end there."""
        ids = self.tokenizer.encode(text, add_special_tokens=False, allow_special=True).tolist()
        matcher = self.start.deep_copy()
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def call(name: str, format: str, arguments: str) -> str:
    wrap = FORMATS[format].wrap
    assert wrap is not None
    begin, end = wrap(name)
    return begin + arguments + end


def forced(
    format: str, tokenizer: Tokenizer, use: ToolUse = USE, answer: Grammar | None = None, **state: Any
) -> Follower:
    forms = OutputForms(PromptBuilder(tokenizer, tool_parser=format))
    return Follower(tokenizer, forms.of(use, answer, **({"is_reasoning": False, "shows_reasoning": True} | state))[1])


@pytest.mark.parametrize("tokenizer", [SPECIAL, PLAIN], ids=["special", "plain"])
@pytest.mark.parametrize("format", WRAPPED)
def test_what_the_grammar_takes_the_parser_reads(format: str, tokenizer: Tokenizer) -> None:
    follower = forced(format, tokenizer)
    first, second = call("get_weather", format, '{"city": "Paris", "days": 2}'), call("now", format, "{}")
    for text, count in ((first, 1), (first + "\n" + second, 2), (second + first, 2)):
        assert follower.takes(text)
        reader = ToolReader(FORMATS[format].read, USE.functions)
        reader.push(text)
        assert reader.has_calls
        parts = reader.take()
        assert {part.index for part in parts if not isinstance(part, str)} == set(range(count))
        assert not any(isinstance(part, str) for part in parts)
    for text in (
        "",
        "It is warm.",
        first + " done",
        call("get_weather", format, "{}"),
        call("get_weather", format, '{"city": 1}'),
        call("get_weather", format, '{"city": "Paris", "other": 1}'),
        call("other", format, "{}"),
        call("now", format, '{"a": 1}'),
    ):
        assert not follower.takes(text)


@pytest.mark.parametrize("format", ["qwen3_coder", "glm45"])
def test_formats_that_are_no_json_are_left_for_json(format: str) -> None:
    assert forced(format, PLAIN).takes(call("now", "json", "{}"))
    form, _ = OutputForms(PromptBuilder(PLAIN, tool_parser=format)).of(
        USE, None, is_reasoning=False, shows_reasoning=True
    )
    assert form.format is FORMATS["json"].read


def test_calls_are_bounded() -> None:
    follower, now = forced("hermes", PLAIN), call("now", "hermes", "{}")
    assert follower.takes("\n".join([now] * MAX_CALLS))
    assert not follower.takes("\n".join([now] * (MAX_CALLS + 1)))


def test_one_call_at_most() -> None:
    follower = forced("hermes", PLAIN, replace(USE, only_one=True))
    now = call("now", "hermes", "{}")
    assert follower.takes(now)
    assert not follower.takes(now + now)


@pytest.mark.parametrize(
    ("tokenizer", "begin", "end"), [(SPECIAL, "[THINK]", "[/THINK]"), (PLAIN, "<think>", "</think>")]
)
@pytest.mark.parametrize("answer", [None, ANSWER], ids=["calls", "answer"])
def test_the_grammar_follows_the_reasoning(tokenizer: Tokenizer, begin: str, end: str, answer: Grammar | None) -> None:
    use = None if answer else USE
    text = '{"n": 1}' if answer else call("now", "hermes", "{}")
    thought = 'So "12" it < is.\n'
    forms = OutputForms(PromptBuilder(tokenizer, tool_parser="hermes"))
    closed = Follower(tokenizer, forms.of(use, answer, is_reasoning=False, shows_reasoning=True)[1])
    assert closed.takes(text)
    assert closed.takes(f"{begin}\n{thought}{end}\n\n{text}")
    assert not closed.takes(f"{begin}\n{thought}{text}")
    assert not closed.takes(f"{begin}{thought}{end}")
    opened = Follower(tokenizer, forms.of(use, answer, is_reasoning=True, shows_reasoning=True)[1])
    assert opened.takes(f"{thought}{end}{text}")
    assert opened.takes(f"{end}\n{text}")
    assert not opened.takes(text)
    assert opened.grammar.json_after == end


def test_calls_or_an_answer_of_a_form() -> None:
    for format in WRAPPED:
        follower = forced(format, PLAIN, replace(USE, mode="auto"), ANSWER)
        assert follower.takes('{"n": 1}')
        assert follower.takes(call("now", format, "{}"))
        assert not follower.takes("It is warm.")
    named = Grammar(kind="json_schema", text='{"type": "object", "properties": {"name": {"type": "string"}}}')
    for format in WRAPPED:
        follower = forced(format, PLAIN, replace(USE, mode="auto"), named)
        assert follower.takes('{"name": "now"}') and follower.takes(call("now", format, "{}"))
    regex = Grammar(kind="regex", text="yes|no")
    follower = forced("hermes", PLAIN, replace(USE, mode="auto"), regex)
    assert follower.takes("yes") and follower.takes(call("now", "hermes", "{}")) and not follower.takes("maybe")
    begins = [call(name, "hermes", "#").partition("#")[0] for name in USE.functions]
    assert follower.grammar.json_begins == tuple(begins)
    assert not forced("hermes", PLAIN, USE, ANSWER).takes('{"n": 1}')


@pytest.mark.parametrize("format", [name for name in WRAPPED if FORMATS[name].trigger])
@pytest.mark.parametrize("tokenizer", [SPECIAL, PLAIN], ids=["special", "plain"])
def test_strict_calls_follow_their_schemas(format: str, tokenizer: Tokenizer) -> None:
    """Unless there is no call; text before and after is free."""
    follower = forced(format, tokenizer, replace(USE, mode="auto", strict=True))
    good, bad = call("get_weather", format, '{"city": "Paris"}'), call("get_weather", format, '{"city": 1}')
    for text in ("It is {warm}.", "I look.\n" + good, good + good + "\n"):
        assert follower.takes(text)
    for text in (bad, "I look.\n" + bad, good + bad, call("other", format, "{}")):
        assert not follower.takes(text)


def test_strict_is_named_where_it_cannot_be_honoured() -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True}}
    hermes = make_app(FakeEngine(), tool_call_parser="hermes")
    assert "x-ignored-params" not in chat(hermes, tools=[tool]).headers
    engine = FakeEngine()
    answer = chat(make_app(engine), tools=[tool])
    assert answer.headers["x-ignored-params"] == "tools.function.strict"
    assert engine.requests[0].sampling.grammar is None
    for choice in ("required", "none"):
        assert "x-ignored-params" not in chat(make_app(FakeEngine()), tools=[tool], tool_choice=choice).headers


def test_a_schema_that_is_open_stays_open() -> None:
    schemas: list[dict[str, Any]] = [{"additionalProperties": {"type": "integer"}}, {"anyOf": [{"type": "object"}]}]
    for schema in schemas:
        use = ToolUse(functions={"f": schema}, mode="named", only_one=True)
        assert forced("json", PLAIN, use).takes(call("f", "json", '{"a": 1}'))


def test_faults_name_the_function() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "hiccup"}}}
    for fields in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        answer = chat(make_app(FakeEngine()), tools=[tool], **fields)
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert "the parameters of f" in answer.error["message"]
    assert chat(make_app(FakeEngine()), tools=[tool]).status == 200
    with pytest.raises(BadRequest):
        forced("json", PLAIN, ToolUse(functions={"f": {"type": 1}}, mode="required"))


@pytest.mark.parametrize(
    ("choice", "finish"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "now"}}, "stop")],
)
def test_forced_calls_through_the_route(choice: object, finish: str) -> None:
    """A named function ends with "stop", as OpenAI has it."""
    engine = FakeEngine(script=says(call("now", "json", "{}")), max_model_len=4096)
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("now", "get_weather")]
    answer = chat(make_app(engine), tools=tools, tool_choice=choice).json["choices"][0]
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert (answer["message"]["content"], answer["finish_reason"]) == (None, finish)
    assert ("get_weather" in engine.requests[0].sampling.grammar.source) == (choice == "required")
    broken = FakeEngine(script=says("no call"), max_model_len=4096)
    answer = chat(make_app(broken), tools=tools, tool_choice=choice).json["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("no call", "stop")


def test_an_output_with_an_end_must_be_able_to_end() -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    for fields in ({"tools": [tool], "tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        answer = chat(make_app(FakeEngine()), ignore_eos=True, **fields)
        assert (answer.status, answer.error["param"]) == (400, "ignore_eos")


def test_marks_are_those_of_the_template() -> None:
    forms = OutputForms(PromptBuilder(make_tokenizer()))
    assert forms.of(None, ANSWER, is_reasoning=False, shows_reasoning=True)[1] == ANSWER
    forms = OutputForms(PromptBuilder(SPECIAL))
    grammar = forms.of(None, ANSWER, is_reasoning=True, shows_reasoning=True)[1]
    assert grammar == replace(ANSWER, reasoning=ReasoningMarks(begin="[THINK]", end="[/THINK]"), is_reasoning=True)
