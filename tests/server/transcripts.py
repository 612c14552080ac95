"""Outputs with tool calls, written in each format by hand, and what they hold."""

from dataclasses import dataclass, field
from typing import Any

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
    },
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
    "now": {"type": "object", "properties": {}},
    "mixed": {
        "type": "object",
        "properties": {
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "ratio": {"type": "number"},
            "flag": {"type": ["boolean", "null"]},
            "unit": {"enum": ["C", "F"]},
            "list": {"type": "array"},
        },
    },
}


@dataclass(frozen=True)
class Transcript:
    """An output."""

    text: str
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """(name, arguments)"""
    complete: bool = True
    """Whether the calls count as calls."""


HARD: dict[str, Any] = {"path": "a/{b}.py", "text": 'if x["}"]:\n\tprint("\\\\{访问👩‍👩‍👧")\n</tool_call'}
HARD_JSON = r'{ "path" : "a/{b}.py", "text": "if x[\"}\"]:\n\tprint(\"\\\\{访问\ud83d\udc69‍👩‍👧\")\n</tool_call" }'
NESTED: dict[str, Any] = {"where": {"at": [1, -2.5e3, [], {}, {"x": [None, True, {"y": ""}]}]}, "days": 3}
NESTED_JSON = '{"where": {"at": [1, -2.5e3, [], {}, {"x": [null, true, {"y": ""}]}]}, "days": 3}'
PARIS: dict[str, Any] = {"city": "Paris"}
PARIS_JSON = '{"city": "Paris"}'


def _weather(arguments: Any = PARIS) -> tuple[str, Any]:
    return "get_weather", arguments


def _json(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def _hermes(name: str, arguments: str) -> str:
    return f"<tool_call>\n{_json(name, arguments)}\n</tool_call>"


HERMES = [
    Transcript(_hermes("get_weather", PARIS_JSON), calls=[_weather()]),
    Transcript("Let me see.\n\n" + _hermes("get_weather", PARIS_JSON), "Let me see.", [_weather()]),
    Transcript(
        "One" + _hermes("write_file", HARD_JSON) + "\n" + _hermes("get_weather", NESTED_JSON) + "\nDone.\n",
        "One\nDone.",
        [("write_file", HARD), _weather(NESTED)],
    ),
    Transcript('<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', calls=[_weather()]),
    Transcript('<tool_call>{"name": "now"}</tool_call>', calls=[("now", {})]),
    Transcript('<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=[("now", {})]),
    Transcript(_hermes("get_weather", r'"{\"city\": \"Paris\"}"'), calls=[_weather()]),
    Transcript(_hermes("write_file", '{"text": "a\nb\tc"}'), calls=[("write_file", {"text": "a\nb\tc"})]),
    Transcript('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}', calls=[_weather()]),
    Transcript(
        _hermes("get_weather", PARIS_JSON)[:-12] + _hermes("now", "{}")[:-12] + _hermes("now", "{}"),
        calls=[_weather(), ("now", {}), ("now", {})],
    ),
    Transcript(
        _hermes("get_weather", PARIS_JSON)[:-12] + "<tool_call> is no call.", "<tool_call> is no call.", [_weather()]
    ),
    Transcript(_hermes("unknown", PARIS_JSON), _hermes("unknown", PARIS_JSON), complete=False),
    Transcript("I say <tool_call> and <b>.\n", "I say <tool_call> and <b>.\n", complete=False),
    Transcript("<tool_call>\n<tool_call>" + _json("now", "{}"), "<tool_call>\n", [("now", {})]),
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
        calls=[_weather({"city": "Paris", "days": 3})],
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
        calls=[_weather({"city": "Paris", "days": 3})],
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
    Transcript(_json("get_weather", PARIS_JSON, "parameters"), calls=[_weather()]),
    Transcript("\n" + _json("write_file", HARD_JSON, "parameters") + "\n", calls=[("write_file", HARD)]),
    Transcript(
        "<|python_tag|>" + _json("now", "{}", "parameters") + "; " + _json("get_weather", NESTED_JSON, "parameters"),
        calls=[("now", {}), _weather(NESTED)],
    ),
    Transcript('{"type": "function", "name": "now", "parameters": {}}', calls=[("now", {})]),
    Transcript("Sure: <|python_tag|>" + _json("now", "{}"), "Sure:", [("now", {})]),
    Transcript("Use {braces}.", "Use {braces}.", complete=False),
    Transcript('{"city": "Paris"}', '{"city": "Paris"}', complete=False),
    Transcript("<|python_tag|>print(1)", "<|python_tag|>print(1)", complete=False),
    Transcript(_json("now", "{}") + " I called.", "I called.", [("now", {})]),
]

MISTRAL = [
    Transcript(f"[TOOL_CALLS][{_json('get_weather', PARIS_JSON)}]", calls=[_weather()]),
    Transcript(
        f"Hm. [TOOL_CALLS] [{_json('write_file', HARD_JSON)} , {_json('now', '{}')}]",
        "Hm.",
        [("write_file", HARD), ("now", {})],
    ),
    Transcript("[TOOL_CALLS]get_weather[ARGS]" + PARIS_JSON, calls=[_weather()]),
    Transcript(
        "[TOOL_CALLS]write_file[CALL_ID]abc123456[ARGS]" + HARD_JSON + "[TOOL_CALLS]now{}",
        calls=[("write_file", HARD), ("now", {})],
    ),
    Transcript("[TOOL_CALLS]nothing[ARGS]{}", "[TOOL_CALLS]nothing[ARGS]{}", complete=False),
    Transcript("[TOOL_CALLS][]", "[TOOL_CALLS][]", complete=False),
    Transcript("[TOOL_CALLS]now[ARGS] none", "[TOOL_CALLS]now[ARGS] none", complete=False),
    Transcript("a [1] [TOOL", "a [1] [TOOL", complete=False),
]

_D_ALL, _D_ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_D, _D_SEP, _D_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _deepseek(name: str, arguments: str) -> str:
    return f"{_D}function{_D_SEP}{name}\n```json\n{arguments}\n```{_D_END}"


DEEPSEEK = [
    Transcript(_D_ALL + _deepseek("get_weather", PARIS_JSON) + _D_ALL_END, calls=[_weather()]),
    Transcript(
        "Yes.\n"
        + _D_ALL
        + _deepseek("write_file", HARD_JSON)
        + "\n"
        + _deepseek("get_weather", NESTED_JSON)
        + _D_ALL_END,
        "Yes.",
        [("write_file", HARD), _weather(NESTED)],
    ),
    Transcript(
        f"{_D_ALL}{_D}now{_D_SEP}{{}}{_D_END}{_D}get_weather{_D_SEP}{PARIS_JSON}{_D_END}{_D_ALL_END}",
        calls=[("now", {}), _weather()],
    ),
    Transcript(f"{_D}nothing{_D_SEP}{{}}", f"{_D}nothing{_D_SEP}{{}}", complete=False),
    Transcript(f"{_D}now{_D_SEP}[]", f"{_D}now{_D_SEP}[]", complete=False),
]

_K_ALL, _K_ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def _harmony(head: str, arguments: str, end: str = "<|call|>") -> str:
    return f"{head}<|message|>{arguments}{end}"


_H_WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json"
HARMONY = [
    Transcript(_harmony(_H_WEATHER, PARIS_JSON), calls=[_weather()]),
    Transcript(_harmony(_H_WEATHER, NESTED_JSON, end=""), calls=[_weather(NESTED)]),
    Transcript(
        "Let me see." + _harmony("to=functions.write_file<|channel|>commentary json", HARD_JSON, "<|end|>"),
        "Let me see.",
        [("write_file", HARD)],
    ),
    Transcript(
        _harmony("<|channel|>analysis to=functions.now code", "{}") + _harmony(_H_WEATHER, PARIS_JSON),
        calls=[("now", {}), _weather()],
    ),
    Transcript(
        _harmony("<|channel|>commentary to=functions.no", "{}"),
        "<|channel|>commentary to=functions.no<|message|>{}<|call|>",
        complete=False,
    ),
    Transcript("Write to=functions.now and so on", "Write to=functions.now and so on", complete=False),
]


def _kimi(name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


KIMI = [
    Transcript(_K_ALL + _kimi("functions.get_weather:0", PARIS_JSON) + _K_ALL_END, calls=[_weather()]),
    Transcript(
        "Two." + _K_ALL + _kimi("functions.write_file:0", HARD_JSON) + _kimi("now:1", " {} ") + _K_ALL_END + "\n",
        "Two.",
        [("write_file", HARD), ("now", {})],
    ),
    Transcript(_kimi("functions.no:0", "{}"), _kimi("functions.no:0", "{}"), complete=False),
]


def _k3_call(name: str, *arguments: tuple[str, str, str]) -> str:
    """Arguments: (key, type, text)"""
    inner = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'
        for key, kind, text in arguments
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{inner}<|close|>call<|sep|>'


def _k3(*calls: str) -> str:
    return f"<|open|>tools<|sep|>{''.join(calls)}<|close|>tools<|sep|>"


_K3_JSON = '<|open|>call tool="{name}" index="1"<|sep|><|open|>json type="object"<|sep|>{json}<|close|>json<|sep|>'
KIMI_K3 = [
    Transcript(_k3(_k3_call("get_weather", ("city", "string", "Paris"))), calls=[_weather()]),
    Transcript(
        "Two.\n"
        + _k3(
            _k3_call("write_file", ("path", "string", HARD["path"]), ("text", "string", HARD["text"])),
            "\n" + _k3_call("get_weather", ("where", "object", '{"at": [1, {"x": null}]}'), ("days", "number", " 3\n")),
        )
        + "\n",
        "Two.",
        [("write_file", HARD), _weather({"where": {"at": [1, {"x": None}]}, "days": 3})],
    ),
    Transcript(
        _k3(
            _k3_call(
                "mixed",
                *(("maybe", "null", "null"), ("ratio", "number", "-2.5e3"), ("flag", "boolean", "true")),
                *(("unit", "string", "C"), ("list", "array", "[1, []]"), ("&amp;&quot;k", "string", "&amp;")),
            )
        ),
        calls=[
            ("mixed", {"maybe": None, "ratio": -2500.0, "flag": True, "unit": "C", "list": [1, []], '&"k': "&amp;"})
        ],
    ),
    Transcript(
        _k3(_k3_call("get_weather", ("city", "number", "Par]is"), ("days", "string", "3"), ("x", "integer", "7"))),
        calls=[_weather({"city": "Par]is", "days": "3", "x": 7})],
    ),
    Transcript(
        '<|open|>call tool="get_weather"<|sep|><|open|>argument key="days"<|sep|>3<|close|>argument<|sep|>'
        '<|open|>argument key="city"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>' + _k3_call("now"),
        calls=[_weather({"days": 3, "city": "3"}), ("now", {})],
    ),
    Transcript(
        _k3(_K3_JSON.format(name="write_file", json=HARD_JSON) + "<|close|>call<|sep|>"), calls=[("write_file", HARD)]
    ),
    Transcript(
        _k3(_k3_call("get_weather", ("city", "string", "<|open|>think<|sep|><|close|>call<|sep|>"))),
        calls=[_weather({"city": "<|open|>think<|sep|><|close|>call<|sep|>"})],
    ),
    Transcript(
        _k3(_k3_call("no", ("a", "string", "b")), _k3_call("now")),
        _k3_call("no", ("a", "string", "b")),
        [("now", {})],
    ),
    Transcript("<|open|>call<|sep|> <|open|>to", "<|open|>call<|sep|> <|open|>to", complete=False),
    Transcript(
        '<|open|>call tool="now"<|sep|><|open|>argument<|sep|>',
        '<|open|>call tool="now"<|sep|><|open|>argument<|sep|>',
        complete=False,
    ),
]

PLAIN_JSON = [
    Transcript(_json("get_weather", PARIS_JSON), calls=[_weather()]),
    Transcript(
        f"[{_json('now', '{}')},\n {_json('write_file', HARD_JSON)}]", calls=[("now", {}), ("write_file", HARD)]
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
