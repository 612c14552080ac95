"""`response_format` and `structured_outputs` on both routes: what reaches the engine, and what is refused, by place."""

from typing import Any

import pytest

from scheduler.request import OutputGrammar
from server.grammar.grammar import Grammar
from server.grammar.verdicts import verdict_on
from server.wire import Event
from tests.server.exchange import chat, complete
from tests.server.fakes import FakeEngine, LocalChecker, make_app

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}
TAG = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<"]}
TAG_TEXT = '{"type":null,"structures":[{"begin":"<f>","schema":{"type":"integer"},"end":"</f>"}],"triggers":["<"]}'

CLOSE = {"close_before_max_tokens": True}
CLOSE_PARAM = "structured_outputs.close_before_max_tokens"


def _expected(grammar: Grammar) -> OutputGrammar | None:
    checker = LocalChecker()
    return verdict_on(grammar, checker.vocabulary, checker.trie).grammar


@pytest.mark.parametrize(
    ("field", "value", "grammar"),
    [
        ("response_format", {"type": "text"}, None),
        ("response_format", {"type": "json_object"}, Grammar(kind="json_object")),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            Grammar(
                kind="json_schema", text='{"type":"object","properties":{"é":{"type":"integer"}},"required":["é"]}'
            ),
        ),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x"}},
            Grammar(kind="json_schema", text="{}"),
        ),
        ("structured_outputs", {"json": {"type": "null"}}, Grammar(kind="json_schema", text='{"type": "null"}')),
        ("structured_outputs", {"json": '{"type": "null"}'}, Grammar(kind="json_schema", text='{"type": "null"}')),
        ("structured_outputs", {"json_object": True}, Grammar(kind="json_object")),
        ("structured_outputs", {"regex": "a+"}, Grammar(kind="regex", text="a+")),
        ("structured_outputs", {"choice": ["a", "é"]}, Grammar(kind="choice", text='["a","é"]')),
        ("structured_outputs", {"grammar": 'start: "a"'}, Grammar(kind="grammar", text='start: "a"')),
        ("structured_outputs", {"structural_tag": TAG}, Grammar(kind="structural_tag", text=TAG_TEXT)),
        ("structured_outputs", {"structural_tag": TAG_TEXT}, Grammar(kind="structural_tag", text=TAG_TEXT)),
    ],
)
@pytest.mark.parametrize("route", [chat, complete])
def test_forms_reach_the_engine(route: Any, field: str, value: object, grammar: Grammar | None) -> None:
    engine = FakeEngine()
    assert route(make_app(engine), **{field: value}, n=2).status == 200
    (request,) = engine.requests
    assert request.sampling.grammar == (None if grammar is None else _expected(grammar))


@pytest.mark.parametrize("route", [chat, complete])
@pytest.mark.parametrize("value", [True, False, None])
def test_outputs_may_be_closed_in_time(route: Any, value: bool | None) -> None:
    engine = FakeEngine()
    fields = {"structured_outputs": {"regex": "a+", "close_before_max_tokens": value}, "max_tokens": 9, "n": 2}
    assert route(make_app(engine), **fields).status == 200
    (request,) = engine.requests
    assert request.sampling.grammar is not None
    assert (request.sampling.grammar.close_before_max_tokens, request.sampling.max_tokens) == (value is True, 9)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "sound"}}, "response_format.type", "response_format.type: "),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is needed with the type"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "x"}}},
            "response_format",
            "json_schema is needed with the type",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name",
            "characters that are not allowed",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"items": {"not": {}}}},
                }
            },
            "response_format.json_schema.schema",
            "response_format.json_schema.schema: at #/items: the keyword 'not' is not supported",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, json_object, regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "no such field"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "at least 1 character"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1 item"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice", "at most 1024 items"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "must be a list"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", ""),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "structured_outputs.json: not JSON"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "at character 0 of a regular expression"),
        (
            {"structured_outputs": {"grammar": "start: a"}},
            "structured_outputs.grammar",
            "line 1, column 8: unknown name",
        ),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag: Field required"),
        (
            {"structured_outputs": {"structural_tag": TAG | {"triggers": ["x"]}}},
            "structured_outputs.structural_tag",
            "structures[0].begin starts with none of the triggers",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            "structured_outputs",
            "Give either response_format or structured_outputs.",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "where the output has a form"),
        ({"structured_outputs": CLOSE}, "structured_outputs", "exactly one of json, json_object, regex"),
        ({"structured_outputs": CLOSE | {"regex": "a"}, "min_tokens": 2}, CLOSE_PARAM, "with bad_words or min_tokens"),
        ({"structured_outputs": CLOSE | {"regex": "a"}, "bad_words": ["b"]}, CLOSE_PARAM, "could forbid the end"),
        ({"structured_outputs": {"regex": "a", "close_before_max_tokens": 1}}, CLOSE_PARAM, "valid boolean"),
        ({"close_before_max_tokens": True}, "close_before_max_tokens", "not supported"),
        ({"guided_json": {}}, "guided_json", "not supported"),
        ({"guided_regex": "a"}, "guided_regex", "not supported"),
    ],
)
@pytest.mark.parametrize("route", [chat, complete])
def test_what_cannot_be_obeyed_is_refused(route: Any, fields: dict[str, object], param: str, message: str) -> None:
    engine = FakeEngine()
    answer = route(make_app(engine), **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert message in answer.error["message"]
    assert (engine.streams, engine.reserved) == ([], 0)


def test_a_dead_end_is_the_requests_own_fault() -> None:
    end = Event(0, finish_reason="dead_end", message="no token is left")
    answer = chat(make_app(FakeEngine(script=lambda request, choice: [end])))
    assert (answer.status, answer.error["message"]) == (400, "no token is left")
    assert answer.error["type"] == "invalid_request_error"
    begun = Event(0, [5])
    app = make_app(FakeEngine(script=lambda request, choice: [begun, end]))
    *_, last = chat(app, stream=True).events
    assert last["error"]["message"] == "no token is left"
