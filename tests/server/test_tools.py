"""Tools through the chat route: what the model is told, and how its calls come back, streamed or not."""

import json
from typing import Any

import pytest

from server.gateway_config import ToolCallParser
from server.output_forms import OutputForms
from server.prompt.build import PromptBuilder
from server.tools.formats import FORMATS
from server.tools.use import ToolUse
from tests.server.exchange import Answer, chat, finishes_of
from tests.server.fakes import CALL, TOKENIZER, FakeEngine, make_app, make_tokenizer, says
from tests.server.transcript import TOOLS
from tests.server.transcripts import ALL

TOOL_LIST = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def ask(text: str, *, reason: str = "stop", per_event: int = 1, parser: str = "hermes", **fields: Any) -> Answer:
    engine = FakeEngine(max_model_len=4096, script=says(text, reason=reason, per_event=per_event))
    answer = chat(make_app(engine, tool_call_parser=parser), **({"tools": TOOL_LIST} | fields))
    assert answer.status == 200, answer.body
    return answer


def message_of(answer: Answer) -> tuple[dict[str, Any], str]:
    """(message, finish reason), each call with its arguments parsed and without its id."""
    choice = answer.json["choices"][0]
    message = {key: value for key, value in choice["message"].items() if key not in ("role", "refusal")}
    return _plain(message), choice["finish_reason"]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    for call in message.get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
        assert call.pop("type") == "function"
        call |= call.pop("function")
    return message


def joined(answer: Answer) -> tuple[dict[str, Any], str]:
    """The same of a stream, whose chunks must be as clients expect them."""
    message: dict[str, Any] = {"content": None}
    for event in answer.events:
        for choice in event["choices"]:
            delta = choice["delta"]
            assert set(delta) <= {"role", "content", "tool_calls", "reasoning_content"}
            if delta.get("content"):
                message["content"] = (message["content"] or "") + delta["content"]
            if "reasoning_content" in delta:
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            for part in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "id" in part:
                    assert part["index"] == len(calls)
                    assert part["function"]["name"] and part["function"]["arguments"] == ""
                    calls.append({key: value for key, value in part.items() if key != "index"})
                else:
                    assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
                    assert part["index"] == len(calls) - 1
                    calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    [finish] = finishes_of(answer.events)[0]
    return _plain(message), finish


@pytest.mark.parametrize("per_event", [1, 7, 1000])
@pytest.mark.parametrize("parser", sorted(ALL))
def test_streamed_and_whole_are_the_same(parser: str, per_event: int) -> None:
    """H19: however many tokens come at once."""
    for transcript in ALL[parser]:
        whole = message_of(ask(transcript.text, per_event=per_event, parser=parser))
        calls = [(call["name"], json.loads(call["arguments"])) for call in whole[0].get("tool_calls", [])]
        assert calls == transcript.calls
        assert (whole[0]["content"] or "") == transcript.content
        assert whole[1] == ("tool_calls" if transcript.complete else "stop")
        streamed, finish = joined(ask(transcript.text, per_event=per_event, parser=parser, stream=True))
        assert (streamed["content"] or "") == transcript.content
        assert (streamed.get("tool_calls"), finish) == (whole[0].get("tool_calls"), whole[1])


def test_shape_of_a_call() -> None:
    answer = ask(CALL)
    [choice] = answer.json["choices"]
    [call] = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert call == {
        "id": call["id"],
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'},
    }
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)


@pytest.mark.parametrize("stream", [False, True])
def test_truncation_is_length(stream: bool) -> None:
    """Wherever the output is cut; what has come of the arguments is their beginning."""
    for limit in range(1, len(CALL) - len("\n</tool_call>")):
        answer = ask(CALL, max_tokens=limit, stream=stream)
        message, finish = joined(answer) if stream else message_of(answer)
        assert finish == "length"
        assert all('{"city":"Paris"}'.startswith(call["arguments"]) for call in message.get("tool_calls", ()))


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_gives_back_what_was_held(stream: bool) -> None:
    """H12."""
    answer = ask("abc <tool_ca END", stop=["END"], stream=stream)
    assert (joined if stream else message_of)(answer) == ({"content": "abc <tool_ca "}, "stop")
    cut = ask(CALL, stop=["Paris"], stream=stream)
    message, finish = (joined if stream else message_of)(cut)
    assert (message["tool_calls"][0]["arguments"], finish) == ('{"city":"', "stop")


def test_one_call_at_most() -> None:
    engine = FakeEngine(max_model_len=4096, script=says(f"{CALL}\n{NOW} more"))
    app = make_app(engine, tool_call_parser="hermes")
    answer = chat(app, tools=TOOL_LIST, parallel_tool_calls=False)
    message, finish = message_of(answer)
    assert ([call["name"] for call in message["tool_calls"]], finish) == (["get_weather"], "tool_calls")
    assert engine.streams[0].finished_by_gateway == [0]
    message, _ = message_of(ask(f"{CALL}\n{NOW} more"))
    assert [call["name"] for call in message["tool_calls"]] == ["get_weather", "now"]


def test_none_means_text() -> None:
    engine = FakeEngine(max_model_len=4096, script=says(CALL))
    answer = chat(make_app(engine, tool_call_parser="hermes"), tools=TOOL_LIST, tool_choice="none")
    assert message_of(answer) == ({"content": CALL}, "stop")
    assert "get_weather" not in TOKENIZER.decode(engine.requests[0].prompt_ids, skip_special_tokens=False)


def test_only_allowed_functions_are_called() -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    assert message_of(ask(CALL, tool_choice=choice)) == ({"content": CALL}, "stop")
    message, finish = message_of(ask(NOW, tool_choice=choice))
    assert ([call["name"] for call in message["tool_calls"]], finish) == (["now"], "tool_calls")


def test_several_choices_have_their_own_calls() -> None:
    engine = FakeEngine(max_model_len=4096, script=says(CALL, "plain", NOW))
    choices = chat(make_app(engine, tool_call_parser="hermes"), tools=TOOL_LIST, n=3).json["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "tool_calls"]
    assert choices[1]["message"]["content"] == "plain"


def test_log_probabilities_cover_calls() -> None:
    for stream in (False, True):
        answer = ask("Hm. " + CALL, logprobs=True, stream=stream)
        choices = (
            [choice for event in answer.events for choice in event["choices"]] if stream else answer.json["choices"]
        )
        entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "Hm. " + CALL


def test_marks_that_are_special_tokens() -> None:
    tokenizer = make_tokenizer("[TOOL_CALLS]", "[ARGS]", "[OTHER]", template="{{ tools }}[TOOL_CALLS]{{ messages }}")
    forms = OutputForms(PromptBuilder(tokenizer))
    use = ToolUse(functions=TOOLS)
    form, _ = forms.of(use, None, is_reasoning=False, shows_reasoning=True)
    assert form.format is FORMATS["mistral"].read
    assert {tokenizer.token_text(id) for id in form.markup_ids} == {"[TOOL_CALLS]", "[ARGS]"}
    assert forms.of(None, None, is_reasoning=False, shows_reasoning=True)[0].markup_ids == frozenset()


def test_every_parser_can_be_chosen() -> None:
    assert set(ToolCallParser.__args__) == {"auto", *FORMATS}  # type: ignore[attr-defined]


def _calling(*ids: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": "{}"}
    return {"role": "assistant", "tool_calls": [{"id": id, "type": "function", "function": function} for id in ids]}


def _result(id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": "x"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([_result("a")], "messages[1].tool_call_id"),
        ([_calling("a"), _result("b")], "messages[2].tool_call_id"),
        ([_calling("a", "a")], "messages[1].tool_calls"),
    ],
)
def test_answers_to_nothing(messages: list[dict[str, Any]], param: str) -> None:
    answer = chat(make_app(FakeEngine()), messages=[{"role": "user", "content": "hi"}, *messages])
    assert (answer.status, answer.error["param"]) == (400, param)


def test_the_same_id_may_come_again_later() -> None:
    turn = [_calling("a"), _result("a")]
    assert chat(make_app(FakeEngine()), messages=[{"role": "user", "content": "hi"}, *turn, *turn]).status == 200
