"""Outputs with tool calls, written in each format by hand, and what they hold."""

from tests.server.transcript import HARD, HARD_JSON, NESTED, NESTED_JSON, PARIS_JSON, Transcript, call_json, weather
from tests.server.transcripts_marks import DEEPSEEK, HARMONY, KIMI, KIMI_K3


def _hermes(name: str, arguments: str) -> str:
    return f"<tool_call>\n{call_json(name, arguments)}\n</tool_call>"


HERMES = [
    Transcript(_hermes("get_weather", PARIS_JSON), calls=[weather()]),
    Transcript("Let me see.\n\n" + _hermes("get_weather", PARIS_JSON), "Let me see.", [weather()]),
    Transcript(
        "One" + _hermes("write_file", HARD_JSON) + "\n" + _hermes("get_weather", NESTED_JSON) + "\nDone.\n",
        "One\nDone.",
        [("write_file", HARD), weather(NESTED)],
    ),
    Transcript('<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', calls=[weather()]),
    Transcript('<tool_call>{"name": "now"}</tool_call>', calls=[("now", {})]),
    Transcript('<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=[("now", {})]),
    Transcript(_hermes("get_weather", r'"{\"city\": \"Paris\"}"'), calls=[weather()]),
    Transcript(_hermes("write_file", '{"text": "a\nb\tc"}'), calls=[("write_file", {"text": "a\nb\tc"})]),
    Transcript('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}', calls=[weather()]),
    Transcript(
        _hermes("get_weather", PARIS_JSON)[:-12] + _hermes("now", "{}")[:-12] + _hermes("now", "{}"),
        calls=[weather(), ("now", {}), ("now", {})],
    ),
    Transcript(
        _hermes("get_weather", PARIS_JSON)[:-12] + "<tool_call> is no call.", "<tool_call> is no call.", [weather()]
    ),
    Transcript(_hermes("unknown", PARIS_JSON), _hermes("unknown", PARIS_JSON), complete=False),
    Transcript("I say <tool_call> and <b>.\n", "I say <tool_call> and <b>.\n", complete=False),
    Transcript("<tool_call>\n<tool_call>" + call_json("now", "{}"), "<tool_call>\n", [("now", {})]),
    Transcript("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", complete=False),
    Transcript(
        '<tool_call>{"name": "now", "name": "now"}', '<tool_call>{"name": "now", "name": "now"}', complete=False
    ),
    Transcript('<tool_call>{"arguments": {}}', '<tool_call>{"arguments": {}}', complete=False),
    Transcript("The price is < 5 <tool", "The price is < 5 <tool", complete=False),
    Transcript("No call.\n\n", "No call.\n\n", complete=False),
    Transcript("", "", complete=False),
]

QWEN_CODER = [
    Transcript(
        "<function=now></function>\n<function=now>\n</function>\n<tool_call>\n<function=now></function></tool_call>",
        calls=[("now", {})] * 3,
    ),
    Transcript("<function=now></function>\n<function=no>", "<function=no>", [("now", {})]),
    Transcript(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        calls=[weather({"city": "Paris", "days": 3})],
    ),
    Transcript(
        'I write.\n<tool_call>\n<function=write_file>\n<parameter=text>\n\n a "b" {c}\n</parameter\n\n</parameter>\n'
        "<parameter=path>x</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "I write.",
        [("write_file", {"text": '\n a "b" {c}\n</parameter\n', "path": "x"}), ("now", {})],
    ),
    Transcript(
        "<function=mixed>\n<parameter=maybe>\nnull\n</parameter>\n<parameter=ratio>\n 0.5\n</parameter>\n"
        "<parameter=flag>\ntrue\n</parameter>\n<parameter=unit>\nC\n</parameter>\n"
        "<parameter=list>\n[1, \n2]\n</parameter>\n"
        '<parameter=other>\n{"a": 1}\n</parameter>\n</function>\n</tool_call>',
        calls=[
            (
                "mixed",
                {"maybe": None, "ratio": 0.5, "flag": True, "unit": "C", "list": [1, 2], "other": {"a": 1}},
            )
        ],
    ),
    Transcript(
        "<function=mixed><parameter=ratio>half</parameter><parameter=maybe>7</parameter></function>",
        calls=[("mixed", {"ratio": "half", "maybe": "7"})],
    ),
    Transcript("<tool_call>\n<function=no>\n</function>", "<tool_call>\n<function=no>\n</function>", complete=False),
    Transcript("a </tool_call> b", "a </tool_call> b", complete=False),
]

GLM = [
    Transcript(
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        calls=[weather({"city": "Paris", "days": 3})],
    ),
    Transcript(
        'Look:\n<tool_call>now\n</tool_call>\n<tool_call>write_file\n<arg_key>text</arg_key>\n<arg_value>\n</arg "é"\n'
        "</arg_value>\n</tool_call>",
        "Look:",
        [("now", {}), ("write_file", {"text": '\n</arg "é"\n'})],
    ),
    Transcript("<tool_call>nothing\n</tool_call>", "<tool_call>nothing\n</tool_call>", complete=False),
    Transcript("<tool_call>now\n<arg_key>a</arg_key> or", "<tool_call>now\n<arg_key>a</arg_key> or", complete=False),
    Transcript("<tool_call> " * 3, "<tool_call> " * 3, complete=False),
]

LLAMA = [
    Transcript(call_json("get_weather", PARIS_JSON, "parameters"), calls=[weather()]),
    Transcript("\n" + call_json("write_file", HARD_JSON, "parameters") + "\n", calls=[("write_file", HARD)]),
    Transcript(
        "<|python_tag|>"
        + call_json("now", "{}", "parameters")
        + "; "
        + call_json("get_weather", NESTED_JSON, "parameters"),
        calls=[("now", {}), weather(NESTED)],
    ),
    Transcript('{"type": "function", "name": "now", "parameters": {}}', calls=[("now", {})]),
    Transcript("Sure: <|python_tag|>" + call_json("now", "{}"), "Sure:", [("now", {})]),
    Transcript("Use {braces}.", "Use {braces}.", complete=False),
    Transcript('{"city": "Paris"}', '{"city": "Paris"}', complete=False),
    Transcript("<|python_tag|>print(1)", "<|python_tag|>print(1)", complete=False),
    Transcript(call_json("now", "{}") + " I called.", "I called.", [("now", {})]),
]

MISTRAL = [
    Transcript(f"[TOOL_CALLS][{call_json('get_weather', PARIS_JSON)}]", calls=[weather()]),
    Transcript(
        f"Hm. [TOOL_CALLS] [{call_json('write_file', HARD_JSON)} , {call_json('now', '{}')}]",
        "Hm.",
        [("write_file", HARD), ("now", {})],
    ),
    Transcript("[TOOL_CALLS]get_weather[ARGS]" + PARIS_JSON, calls=[weather()]),
    Transcript(
        "[TOOL_CALLS]write_file[CALL_ID]abc123456[ARGS]" + HARD_JSON + "[TOOL_CALLS]now{}",
        calls=[("write_file", HARD), ("now", {})],
    ),
    Transcript("[TOOL_CALLS]nothing[ARGS]{}", "[TOOL_CALLS]nothing[ARGS]{}", complete=False),
    Transcript("[TOOL_CALLS][]", "[TOOL_CALLS][]", complete=False),
    Transcript("[TOOL_CALLS]now[ARGS] none", "[TOOL_CALLS]now[ARGS] none", complete=False),
    Transcript("a [1] [TOOL", "a [1] [TOOL", complete=False),
]

PLAIN_JSON = [
    Transcript(call_json("get_weather", PARIS_JSON), calls=[weather()]),
    Transcript(
        f"[{call_json('now', '{}')},\n {call_json('write_file', HARD_JSON)}]", calls=[("now", {}), ("write_file", HARD)]
    ),
    Transcript("[1, 2]", "[1, 2]", complete=False),
    Transcript('{"answer": {"name": 1}}', '{"answer": {"name": 1}}', complete=False),
    Transcript("An array: [] {}", "An array: [] {}", complete=False),
]

ALL = {
    "hermes": HERMES,
    "qwen3_coder": QWEN_CODER,
    "glm45": GLM,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK[2:],
    "harmony": HARMONY,
    "kimi_k2": KIMI,
    "kimi_k3": KIMI_K3,
    "json": PLAIN_JSON,
}
CASES = [(name, transcript) for name, transcripts in ALL.items() for transcript in transcripts]
