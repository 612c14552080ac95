"""Kimi K3's outputs: reasoning, answers and calls are told apart however the text is cut, what was written as history
is read as it was, and outputs with a grammar."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from server.grammar.grammar import Grammar
from server.output import OutputForm
from server.output_forms import OutputForms
from server.prompt.build import PromptBuilder
from server.prompt.options import ChatOptions
from server.prompt.tokenizer import Tokenizer, load_tokenizer
from server.tools.formats import FORMATS
from server.tools.use import ToolUse
from server.xtml import MARKS, MESSAGE_END, RESPONSE, RESPONSE_END, THINK, THINK_END
from tests.server.exchange import chat
from tests.server.fakes import FakeEngine, make_app, says
from tests.server.test_forced_calls import Follower
from tests.server.test_output import read
from tests.server.test_prompt_xtml import k3_folder
from tests.server.transcript import TOOLS

FORM = OutputForm(reasoning=MARKS, is_reasoning=True, tools=ToolUse(functions=TOOLS), format=FORMATS["kimi_k3"].read)
QUIET = replace(FORM, is_reasoning=False)
THOUGHT = f"Is it <b>x? \n{THINK_END}"
YES = f"{RESPONSE} Yes.\n{RESPONSE_END}"
EMPTY = f"{RESPONSE}{RESPONSE_END}"
CALL = (
    '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|>"
)
REASONED = "Is it <b>x? \n"
WEATHER = {0: ("get_weather", '{"city":"Paris"}')}


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (f"{THOUGHT}{YES}{MESSAGE_END}", " Yes.\n", REASONED, {}),
        (f"{THINK}{THOUGHT}\n{RESPONSE}Yes < <| no", "Yes < <| no", REASONED, {}),
        (f"{THOUGHT}{EMPTY}{CALL}{MESSAGE_END}<|end_of_msg|>", "", REASONED, WEATHER),
        (f"{THOUGHT}{YES}{CALL}", " Yes.", REASONED, WEATHER),
        ("half a thought", "", "half a thought", {}),
        ("half a thought<|close|>thi", "", "half a thought", {}),
        # a section that was not closed, an answer that was not opened
        (f"hm{YES}", " Yes.\n", "hm", {}),
        (f"hm{CALL}", "", "hm", WEATHER),
        (f"{THOUGHT}\n Yes. No.{RESPONSE_END}", "Yes. No.", REASONED, {}),
        # thoughts between calls
        (f"{THOUGHT}{YES}{THINK}again{THINK_END}{CALL}", " Yes.", f"{REASONED}again", WEATHER),
        # a call that is cut
        (CALL[:-60], "", "", {0: ("get_weather", '{"city":"Paris')}),
        (CALL[:-5], "", "", WEATHER),
        # a function that there is not
        (f"hm{CALL.replace('get_', 'no_')}", CALL.replace("get_", "no_")[20:-21], "hm", {}),
    ],
)
def test_sections(text: str, content: str, reasoning: str, calls: dict[int, tuple[str, str]]) -> None:
    found = read([text], FORM, ())
    assert found[:3] == (content, reasoning, calls)
    assert found[3] == len(text.encode())
    assert found[5] == (calls == WEATHER)


def test_arguments_may_hold_marks_of_other_sections() -> None:
    held = f"{THINK}{RESPONSE_END}"
    found = read(f"hm{CALL.replace('Paris', held)}", FORM, ())
    assert (found[1], found[5]) == ("hm", True)
    assert json.loads(found[2][0][1]) == {"city": held}


def test_without_thinking_the_answer_is_open() -> None:
    assert read([f"Yes.{RESPONSE_END}{CALL}{MESSAGE_END}"], QUIET, ())[:3] == ("Yes.", "", WEATHER)
    assert read(["Yes <|open|>"], QUIET, ())[:2] == ("Yes ", "")
    whole = f'<|open|>message role="assistant"<|sep|>{THINK}hm{THINK_END}{YES}'
    assert read([whole], QUIET, ())[:2] == (" Yes.\n", "hm")


def test_without_tools_calls_are_text() -> None:
    assert read([f"{THOUGHT}{YES}{CALL}"], replace(FORM, tools=None), ())[0] == f" Yes.\n{CALL}"


PIECES = st.lists(
    st.sampled_from(["<|open|>", "<|close|>", "<|sep|>", "think", "response", "tools", "message", "call", "argument"])
    | st.sampled_from(["<|end_of_msg|>", "<|", ' tool="now"', ' key="a"', " ", "\n", "é", '"', "{", "json", "END"])
    | st.sampled_from([THOUGHT, YES, EMPTY, CALL, MESSAGE_END, "x" * 513]),
    max_size=10,
)


@settings(max_examples=200, deadline=None)
@given(PIECES, st.booleans(), st.sampled_from([(), ("END", "\n")]))
def test_any_cut_gives_the_same_and_nothing_is_lost(
    pieces: list[str], is_reasoning: bool, stop: tuple[str, ...]
) -> None:
    text, form = "".join(pieces), replace(FORM, is_reasoning=is_reasoning)
    whole = read([text], form, stop)
    assert read(pieces, form, stop) == read(text, form, stop) == whole
    assert stop or whole[3] == len(text.encode())


@pytest.mark.parametrize("place", range(len(THOUGHT + YES + CALL + MESSAGE_END)))
def test_cut_in_two(place: int) -> None:
    text = THOUGHT + YES + CALL + MESSAGE_END
    assert read([text[:place], text[place:]], FORM, ())[:3] == (" Yes.", REASONED, WEATHER)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(k3_folder(tmp_path_factory.mktemp("k3")))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(st.text(min_size=1, max_size=30), JSON, max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    st.text(),
    st.text(),
    st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), ARGUMENTS), max_size=3),
    st.booleans(),
)
def test_what_is_written_is_read(
    tokenizer: Tokenizer, reasoning: str, content: str, calls: list[tuple[str, Any]], thinks: bool
) -> None:
    """An assistant's message is the same after it was written as history and read as an output."""
    listed = [
        {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(calls)
    ]
    user = {"role": "user", "content": "Hi"}
    said = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": listed}
    before, whole = prompt(tokenizer, [user], thinks, True), prompt(tokenizer, [user, said], thinks, False)
    assert whole[: len(before)] == before
    text = tokenizer.decode(whole[len(before) :], skip_special_tokens=False)
    form = FORM if thinks else QUIET
    found = read(text, form, ())
    assert [(name, json.loads(arguments)) for name, arguments in found[2].values()] == calls
    expected = content.rstrip() if calls else content
    assert found[:2] == (expected, reasoning if thinks and reasoning.strip() else "")


def prompt(tokenizer: Tokenizer, messages: list[dict[str, Any]], thinks: bool, answers: bool) -> list[int]:
    options = ChatOptions(variables={"thinking": thinks}, add_generation_prompt=answers)
    return asyncio.run(PromptBuilder(tokenizer).chat(messages, max_model_len=99_999, options=options)).ids.tolist()


SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
NUMBERS = Grammar(kind="json_schema", text=SCHEMA)
NOW, WEATHER_CALL = (
    "{}".join(FORMATS["kimi_k3"].wrap("now")),  # type: ignore[misc]
    '{"days": 3}'.join(FORMATS["kimi_k3"].wrap("get_weather")),  # type: ignore[misc]
)


def follower(tokenizer: Tokenizer, grammar: Grammar | None, mode: Any, *, thinks: bool) -> Follower:
    use = None if mode is None else ToolUse(functions={"now": {}, "get_weather": TOOLS["get_weather"]}, mode=mode)
    forms = OutputForms(PromptBuilder(tokenizer))
    return Follower(tokenizer, forms.of(use, grammar, is_reasoning=thinks, shows_reasoning=True)[1])


def ended(*texts: str) -> Iterable[str]:
    """As the model ends a message, and as it ends where no token is left for that."""
    for text in texts:
        yield from (text, text + MESSAGE_END)


@pytest.mark.parametrize("thinks", [True, False])
def test_grammars_begin_in_the_answer(tokenizer: Tokenizer, thinks: bool) -> None:
    before = f"hm{THINK_END}{RESPONSE}" if thinks else ""
    json_form = follower(tokenizer, NUMBERS, None, thinks=thinks)
    for text in ended(f'{before}{{"n": 1}}', f'{before}{{"n": 1}}{RESPONSE_END}'):
        assert json_form.takes(text)
    for text in (f'hm{THINK_END}{{"n": 1}}', f"{before}no", f'{before}{{"n": 1}}{THINK_END}', f"{before}{NOW}", before):
        assert not json_form.takes(text)


@pytest.mark.parametrize("thinks", [True, False])
def test_forced_calls_follow_an_empty_answer(tokenizer: Tokenizer, thinks: bool) -> None:
    before = f"hm{THINK_END}{RESPONSE}" if thinks else ""
    required = follower(tokenizer, None, "required", thinks=thinks)
    calls = f"{before}{RESPONSE_END}{NOW}\n{WEATHER_CALL}"
    for text in ended(f"{before}{RESPONSE_END}{NOW}", calls):
        assert required.takes(text)
        assert read([text], FORM if thinks else QUIET, ())[5]
    for text in (f"{before}{NOW}", f"{before}Yes{RESPONSE_END}{NOW}", f'{before}{{"n": 1}}', f"{before}{RESPONSE_END}"):
        assert not required.takes(text)
    found = read(calls, FORM if thinks else QUIET, ())[2]
    assert found == {0: ("now", "{}"), 1: ("get_weather", '{"days":3}')}
    either = follower(tokenizer, NUMBERS, "auto", thinks=thinks)
    for text in ended(calls, f'{before}{{"n": 1}}', f'{before}{{"n": 1}}{RESPONSE_END}'):
        assert either.takes(text)
    assert not either.takes(f"{before}no")


def test_strict_tools_are_not_followed(tokenizer: Tokenizer) -> None:
    assert not OutputForms(PromptBuilder(tokenizer)).follows_schemas


DECLARED = [{"type": "function", "function": {"name": "get_weather", "parameters": TOOLS["get_weather"]}}]


def served(tokenizer: Tokenizer, text: str) -> tuple[FastAPI, FakeEngine]:
    engine = FakeEngine(max_model_len=4096, script=says(text, tokenizer=tokenizer))
    return make_app(engine, tokenizer=tokenizer), engine


def test_a_request_with_tools(tokenizer: Tokenizer) -> None:
    app, _ = served(tokenizer, f"{THOUGHT}{YES}{CALL}{MESSAGE_END}")
    choice = chat(app, tools=DECLARED).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == (" Yes.", REASONED)
    assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city":"Paris"}'}


def test_a_stream(tokenizer: Tokenizer) -> None:
    app, _ = served(tokenizer, f"{THOUGHT}{YES}{CALL}{MESSAGE_END}")
    deltas = [event["choices"][0]["delta"] for event in chat(app, tools=DECLARED, stream=True).events]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == REASONED
    assert "".join(delta.get("content") or "" for delta in deltas) == " Yes."
    functions = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert len(functions) > 3
    assert "".join(function.get("arguments") or "" for function in functions) == '{"city":"Paris"}'


def test_a_request_that_wants_no_reasoning(tokenizer: Tokenizer) -> None:
    app, engine = served(tokenizer, f"Yes.{RESPONSE_END}{MESSAGE_END}")
    answer = chat(app, reasoning_effort="none")
    message = answer.json["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == ("Yes.", None)
    assert "x-ignored-params" not in answer.headers
    asked = tokenizer.decode(engine.requests[0].prompt_ids, skip_special_tokens=False)
    assert asked.endswith(f'<|open|>message role="assistant"<|sep|>{RESPONSE}')
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    refused = chat(app, messages=[{"role": "user", "content": [image]}])
    assert refused.status == 400
    assert "does not accept images" in refused.error["message"]
