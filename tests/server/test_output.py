"""The pipeline from text to reasoning, content and calls gives the same however the text is cut."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.output import OutputForm, OutputReader
from server.reasoning import ReasoningMarks
from server.tools.formats import FORMATS
from server.tools.use import ToolUse
from tests.server.transcript import TOOLS
from tests.server.transcripts import CASES

FORM = OutputForm(
    reasoning=ReasoningMarks(begin="<think>", end="</think>"),
    tools=ToolUse(functions=TOOLS),
    format=FORMATS["hermes"].read,
)
HERMES = [transcript.text for name, transcript in CASES if name == "hermes"]
PIECES = st.lists(
    st.one_of(
        st.sampled_from(["<think>", "</think>", "END", "EN", "</thi", "<tool_call>", "{", '"', " ", "\n", "é"]),
        st.sampled_from(HERMES),
    ),
    max_size=8,
)

Found = tuple[str, str, dict[int, tuple[str, str]], int, str | None, bool]


def read(pieces: Iterable[str], form: OutputForm, stop: tuple[str, ...]) -> Found:
    """(content, reasoning, calls, bytes of text, stop string, whether it calls)"""
    reader = OutputReader(form, stop, False)
    content, reasoning, size = "", "", 0
    calls: dict[int, tuple[str, str]] = {}
    for piece in [*pieces, None]:
        if piece is None:
            reader.finish()
        elif not reader.is_over:
            reader.push(piece, may_stop=True)
        parts = reader.take()
        reasoning, size = reasoning + parts.reasoning, size + parts.text_bytes
        for part in parts.answer:
            if isinstance(part, str):
                content += part
                continue
            name, arguments = calls.get(part.index, (part.name, ""))
            calls[part.index] = (name, arguments + part.arguments)
    return content, reasoning, calls, size, reader.stopped, reader.has_calls


@settings(max_examples=300)
@given(PIECES, st.booleans(), st.sampled_from([(), ("END",), ("END", "\n", "</tool")]))
def test_any_cut_gives_the_same(pieces: list[str], is_reasoning: bool, stop: tuple[str, ...]) -> None:
    text, form = "".join(pieces), replace(FORM, is_reasoning=is_reasoning)
    whole = read([text], form, stop)
    assert read(pieces, form, stop) == whole
    assert read(text, form, stop) == whole
    content, reasoning, _, size, stopped, _ = whole
    assert size == len(text.encode()) or (stopped is not None and size < len(text.encode()))
    assert not any(string in content for string in stop)
    assert "</think>" not in reasoning


@given(PIECES)
def test_without_a_form_text_is_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert read(pieces, OutputForm(), ()) == (text, "", {}, len(text.encode()), None, False)


@pytest.mark.parametrize("text", HERMES)
def test_calls_follow_reasoning(text: str) -> None:
    form, plain = replace(FORM, is_reasoning=True), replace(FORM, reasoning=None)
    assert read([f"hm <tool_call> </think>\n\n{text}"], form, ())[2] == read([text], plain, ())[2]
