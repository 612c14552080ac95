"""GPT-OSS's channels: reasoning, answers and calls are told apart however the text is cut; outputs with a grammar."""

import asyncio
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.grammar.grammar import Grammar
from server.output import OutputForm
from server.output_forms import OutputForms
from server.prompt.build import PromptBuilder
from server.prompt.tokenizer import Tokenizer
from server.reasoning import ReasoningMarks, is_open, marks_of
from server.tools.formats import FORMATS, format_of
from server.tools.use import ToolUse
from tests.server.exchange import chat
from tests.server.fakes import FakeEngine, make_app, make_tokenizer, says
from tests.server.test_forced_calls import Follower
from tests.server.test_output import read
from tests.server.transcript import TOOLS

TEMPLATE = """{%- for tool in tools or [] %}namespace functions {{ tool | tojson }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('one of the two') }}{% endif %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' if message.thinking }}
{{- '<|start|>assistant to=functions.' + message.tool_calls[0].function.name }}
{{- '<|channel|>commentary json<|message|>' }}{{ message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
MARKS = marks_of(TEMPLATE) or ReasoningMarks(begin="", end="")
FORM = OutputForm(reasoning=MARKS, tools=ToolUse(functions=TOOLS), format=FORMATS["harmony"].read)
THOUGHT = "<|channel|>analysis<|message|>Is it <b>x?<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
WEATHER = {0: ("get_weather", '{"city":"Paris"}')}


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (f"{THOUGHT}{FINAL}Yes.<|return|>", "Yes.", "Is it <b>x?", {}),
        (f"{THOUGHT}{FINAL}Yes < no", "Yes < no", "Is it <b>x?", {}),
        ("<|channel|>final<|message|>Yes.", "Yes.", "", {}),
        ("Yes.", "Yes.", "", {}),
        (THOUGHT[:-7], "", "Is it <b>x?", {}),
        (f'{THOUGHT}{CALL}{{"city": "Paris"}}<|call|>', "", "Is it <b>x?", WEATHER),
        (f'{THOUGHT}{CALL}{{"city": "Paris"}}', "", "Is it <b>x?", WEATHER),
        (
            f'{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>{CALL}{{"city": "Paris"}}',
            "Wait.",
            "Is it <b>x?",
            WEATHER,
        ),
        (
            ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
            "",
            "",
            WEATHER,
        ),
        (f"{THOUGHT}<|start|>assistant{THOUGHT}{FINAL}Yes.", "Yes.", "Is it <b>x?Is it <b>x?", {}),
        ("<|channel|>analysis to=python code<|message|>1+1<|call|>", "", "1+1", {}),
        (f"{THOUGHT}<|start|>assistant<|channel|>fi", "", "Is it <b>x?", {}),
    ],
)
def test_channels(text: str, content: str, reasoning: str, calls: dict[int, tuple[str, str]]) -> None:
    found = read([text], FORM, ())
    assert found[:3] == (content, reasoning, calls)
    assert found[5] == bool(calls)


PIECES = st.lists(
    st.one_of(
        st.sampled_from(["<|start|>", "assistant", "<|channel|>", "analysis", "final", "commentary", "<|message|>"]),
        st.sampled_from(
            ["<|end|>", "<|call|>", " to=functions.get_weather", "<|", "{", '"', " ", "é", "<|constrain|>"]
        ),
        st.sampled_from([THOUGHT, FINAL, CALL, '{"city": "Paris"}', "x" * 513]),
    ),
    max_size=10,
)


@settings(max_examples=120, deadline=None)
@given(PIECES, st.booleans())
def test_any_cut_gives_the_same_and_nothing_is_lost(pieces: list[str], is_reasoning: bool) -> None:
    text = "".join(pieces)
    form = OutputForm(reasoning=MARKS, is_reasoning=is_reasoning, tools=FORM.tools, format=FORM.format)
    whole = read([text], form, ())
    assert read(pieces, form, ()) == read(text, form, ()) == whole
    assert whole[3] == len(text.encode())


def test_the_template_says_so() -> None:
    assert MARKS.answer == "<|channel|>final<|message|>"
    assert format_of(TEMPLATE, shows_tools=True) is FORMATS["harmony"]
    assert not is_open(MARKS, "<|end|><|start|>assistant", "")
    assert is_open(MARKS, "<|start|>assistant<|channel|>analysis<|message|>", "")


SPECIAL = make_tokenizer(*MARKS.tokens, template=TEMPLATE)
PLAIN = make_tokenizer(template=TEMPLATE)
SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'


def outputs(*texts: str) -> Iterable[str]:
    """With reasoning before, and without."""
    for text in texts:
        yield text
        yield f"{THOUGHT}<|start|>assistant{text}"


@pytest.mark.parametrize("tokenizer", [SPECIAL, PLAIN], ids=["special", "plain"])
def test_grammars_begin_in_the_channel_of_answers(tokenizer: Tokenizer) -> None:
    follower = Follower(tokenizer, Grammar(kind="json_schema", text=SCHEMA, reasoning=MARKS))
    assert all(follower.takes(text) for text in outputs('<|channel|>final<|message|>{"n": 1}'))
    for text in outputs('{"n": 1}', "<|channel|>final<|message|>no", '<|channel|>commentary<|message|>{"n": 1}'):
        assert not follower.takes(text)


def forced(answer: Grammar | None, tokenizer: Tokenizer, mode: str) -> Follower:
    use = ToolUse(functions={"now": {}}, mode=mode)  # type: ignore[arg-type]
    forms = OutputForms(PromptBuilder(tokenizer))
    return Follower(tokenizer, forms.of(use, answer, is_reasoning=False, shows_reasoning=True)[1])


@pytest.mark.parametrize("tokenizer", [SPECIAL, PLAIN], ids=["special", "plain"])
def test_forced_calls_are_in_their_channel_and_answers_in_theirs(tokenizer: Tokenizer) -> None:
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    answer = '<|channel|>final<|message|>{"n": 1}'
    required = forced(None, tokenizer, "required")
    assert all(required.takes(text) for text in outputs(call))
    assert not any(required.takes(text) for text in outputs(answer, "<|channel|>final<|message|>x"))
    either = forced(Grammar(kind="json_schema", text=SCHEMA), tokenizer, "auto")
    assert all(either.takes(text) for text in outputs(call, answer))
    assert not any(either.takes(text) for text in outputs('{"n": 1}', "<|channel|>final<|message|>x"))


def test_special_tokens_of_the_format_are_text() -> None:
    form, _ = OutputForms(PromptBuilder(SPECIAL)).of(FORM.tools, None, is_reasoning=False, shows_reasoning=True)
    assert form.markup_ids == {SPECIAL.id_of(mark) for mark in MARKS.tokens}


def test_a_request_with_tools() -> None:
    app = make_app(FakeEngine(max_model_len=4096, script=says(f'{THOUGHT}{CALL}{{"city": "Paris"}}')), tokenizer=PLAIN)
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": TOOLS["get_weather"]}}]
    choice = chat(app, tools=tools).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "Is it <b>x?"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city":"Paris"}'}
    said = make_app(FakeEngine(max_model_len=4096, script=says(f"{THOUGHT}{FINAL}Yes.")), tokenizer=PLAIN)
    message = chat(said).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Is it <b>x?", "Yes.")


@pytest.mark.parametrize(
    ("content", "has_calls", "shown"), [("", True, True), ("Wait.", True, False), ("Yes.", False, False)]
)
def test_reasoning_goes_back_under_the_name_that_the_template_knows(content: str, has_calls: bool, shown: bool) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]
    message: dict[str, object] = {"role": "assistant", "content": content, "reasoning_content": "hm"}
    messages = [{"role": "user", "content": "x"}, message | ({"tool_calls": calls} if has_calls else {})]
    prompt = asyncio.run(PromptBuilder(PLAIN).chat(messages, max_model_len=4096))
    assert ("<|channel|>analysis<|message|>hm<|end|>" in PLAIN.decode(prompt.ids, skip_special_tokens=False)) == shown
