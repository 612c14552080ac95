"""Reasoning is told from content: marks, white space, any cut into pieces, stop strings, log-probabilities."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.request import SamplingParams
from server.choice import ChoiceText, Delta, Prompt
from server.generation import GenerationRequest
from server.output import OutputForm
from server.reasoning import Kind, ReasoningMarks, ReasoningSplitter, marks_of
from server.wire import Event, Logprob
from tests.server.exchange import chat
from tests.server.fakes import EOS, TEMPLATE, TOKENIZER, FakeEngine, ids_of, make_app, make_tokenizer, says

THINK = ReasoningMarks(begin="<think>", end="</think>")
FORM = OutputForm(reasoning=THINK)


def split(pieces: list[str], *, is_open: bool = False) -> tuple[str, str]:
    """(reasoning, content); every character must come out once."""
    splitter = ReasoningSplitter(THINK, is_open=is_open)
    found = [part for piece in pieces for part in splitter.push(piece)] + list(splitter.finish())
    assert "".join(text for _, text in found) == "".join(pieces)
    texts = ("".join(text for kind, text in found if kind is wanted) for wanted in (Kind.REASONING, Kind.CONTENT))
    return next(texts), next(texts)


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\na b\n</think>\n\nyes", False, ("a b", "yes")),
        ("\n <think>a</think>b", False, ("a", "b")),
        ("a b\n</think>\n\nyes\n", True, ("a b", "yes\n")),
        ("<think>\na</think>b", True, ("a", "b")),
        ("<think>\n\n</think>\n\nyes", False, ("", "yes")),
        ("</think>yes", True, ("", "yes")),
        ("yes <think>no</think>", False, ("", "yes <think>no</think>")),
        (" yes", False, ("", " yes")),
        ("<thin", False, ("", "<thin")),
        ("\n", False, ("", "\n")),
        ("a </thi", True, ("a </thi", "")),
        ("a \n", True, ("a", "")),
        ("a <think> b </ think></think></think>c", True, ("a <think> b </ think>", "</think>c")),
        ("", True, ("", "")),
    ],
)
def test_what_is_reasoning(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    assert split([text], is_open=is_open) == expected
    assert split(list(text), is_open=is_open) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "</", "think", ">", " ", "\n", "a"]), max_size=12), st.booleans()
)
def test_any_cut_gives_the_same(pieces: list[str], is_open: bool) -> None:
    assert split(pieces, is_open=is_open) == split(["".join(pieces)], is_open=is_open)


def test_marks_come_from_the_template() -> None:
    assert marks_of("{% if '</think>' in content %}") == THINK
    assert marks_of("[THINK]{{ x }}[/THINK]") == ReasoningMarks(begin="[THINK]", end="[/THINK]")
    assert marks_of("{{ messages }}") is None


def read(text: str, form: OutputForm = FORM, *, logprobs: int = -1, stop: tuple[str, ...] = ()) -> list[Delta]:
    """The deltas of a choice whose tokens come one by one, then an end token."""
    sampling = SamplingParams(max_tokens=1000, eos_token_ids=(EOS,), logprobs=logprobs)
    request = GenerationRequest(
        prompt_ids=TOKENIZER.encode("x", add_special_tokens=False, allow_special=False), sampling=sampling, stop=stop
    )
    choice = ChoiceText(0, Prompt(request=request, form=form), TOKENIZER)
    deltas = []
    for token_id in [*ids_of(text), EOS]:
        event = Event(
            0, [token_id], finish_reason="stop" if token_id == EOS else None, logprobs=[Logprob(-1.0, [], [])]
        )
        delta = None if choice.ended else choice.push(event, [])
        deltas += [] if delta is None else [delta]
    return deltas


def test_stop_strings_do_not_act_inside() -> None:
    """H11: nor does one that the end mark would complete, or that begins before it."""
    deltas = read("<think>a END b</think>\n\nc END d", stop=("END", "b</think>", "\n\n", ">\n\nc"))
    assert "".join(delta.reasoning for delta in deltas) == "a END b"
    assert "".join(delta.text for delta in deltas) == "c "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "END")


def test_log_probabilities_are_of_all_that_was_written() -> None:
    text = "<think>\na é</think>\n\nhello"
    deltas = read(text, logprobs=0)
    assert b"".join(token.data for delta in deltas for token in delta.tokens) == text.encode()
    cut = read(text + " END more", logprobs=0, stop=("END",))
    assert b"".join(token.data for delta in cut for token in delta.tokens) == (text + " ").encode()


def test_reasoning_can_be_left_out() -> None:
    deltas = read("<think>a</think>b", OutputForm(reasoning=THINK, shows_reasoning=False))
    assert [delta.reasoning for delta in deltas if delta.reasoning] == []
    assert "".join(delta.text for delta in deltas) == "b"


@pytest.mark.parametrize(
    ("template", "effort", "ignored"),
    [
        ("", "none", False),
        ("", "low", True),
        ("</think>", "none", True),
        ("</think>{{ enable_thinking }}", "none", False),
    ],
)
def test_an_effort_that_has_no_effect_is_named(template: str, effort: str, ignored: bool) -> None:
    app = make_app(FakeEngine(), make_tokenizer(template=TEMPLATE + template))
    answer = chat(app, reasoning_effort=effort)
    assert answer.status == 200
    assert (answer.headers.get("x-ignored-params") == "reasoning_effort") == ignored


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_through_the_route(stream: bool) -> None:
    app = make_app(
        FakeEngine(script=says("<think>\nhm\n</think>\n\nhello")), make_tokenizer(template=TEMPLATE + "{# </think> #}")
    )
    answer = chat(app, stream=stream, stream_options={"include_usage": True} if stream else None)
    if stream:
        deltas = [choice["delta"] for event in answer.events for choice in event["choices"]]
        message = {key: "".join(delta.get(key, "") for delta in deltas) for key in ("content", "reasoning_content")}
        usage = answer.events[-1]["usage"]
    else:
        message, usage = answer.json["choices"][0]["message"], answer.json["usage"]
    assert (message["content"], message["reasoning_content"]) == ("hello", "hm")
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(ids_of("\nhm\n</think>"))
    cut = chat(app, max_tokens=9).json["choices"][0]
    assert (cut["message"]["content"], cut["message"]["reasoning_content"], cut["finish_reason"]) == (
        None,
        "h",
        "length",
    )
    left_out = chat(app, include_reasoning=False).json["choices"][0]["message"]
    assert left_out == {"role": "assistant", "content": "hello", "refusal": None}
