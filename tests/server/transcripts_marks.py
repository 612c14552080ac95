"""Outputs in formats whose calls stand between special tokens: part of `transcripts.py`."""

from tests.server.transcript import HARD, HARD_JSON, NESTED, NESTED_JSON, PARIS_JSON, Transcript, weather

_D_ALL, _D_ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_D, _D_SEP, _D_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _deepseek(name: str, arguments: str) -> str:
    return f"{_D}function{_D_SEP}{name}\n```json\n{arguments}\n```{_D_END}"


DEEPSEEK = [
    Transcript(_D_ALL + _deepseek("get_weather", PARIS_JSON) + _D_ALL_END, calls=[weather()]),
    Transcript(
        "Yes.\n"
        + _D_ALL
        + _deepseek("write_file", HARD_JSON)
        + "\n"
        + _deepseek("get_weather", NESTED_JSON)
        + _D_ALL_END,
        "Yes.",
        [("write_file", HARD), weather(NESTED)],
    ),
    Transcript(
        f"{_D_ALL}{_D}now{_D_SEP}{{}}{_D_END}{_D}get_weather{_D_SEP}{PARIS_JSON}{_D_END}{_D_ALL_END}",
        calls=[("now", {}), weather()],
    ),
    Transcript(f"{_D}nothing{_D_SEP}{{}}", f"{_D}nothing{_D_SEP}{{}}", complete=False),
    Transcript(f"{_D}now{_D_SEP}[]", f"{_D}now{_D_SEP}[]", complete=False),
]

_K_ALL, _K_ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def _harmony(head: str, arguments: str, end: str = "<|call|>") -> str:
    return f"{head}<|message|>{arguments}{end}"


_H_WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json"
HARMONY = [
    Transcript(_harmony(_H_WEATHER, PARIS_JSON), calls=[weather()]),
    Transcript(_harmony(_H_WEATHER, NESTED_JSON, end=""), calls=[weather(NESTED)]),
    Transcript(
        "Let me see." + _harmony("to=functions.write_file<|channel|>commentary json", HARD_JSON, "<|end|>"),
        "Let me see.",
        [("write_file", HARD)],
    ),
    Transcript(
        _harmony("<|channel|>analysis to=functions.now code", "{}") + _harmony(_H_WEATHER, PARIS_JSON),
        calls=[("now", {}), weather()],
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
    Transcript(_K_ALL + _kimi("functions.get_weather:0", PARIS_JSON) + _K_ALL_END, calls=[weather()]),
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
    Transcript(_k3(_k3_call("get_weather", ("city", "string", "Paris"))), calls=[weather()]),
    Transcript(
        "Two.\n"
        + _k3(
            _k3_call("write_file", ("path", "string", HARD["path"]), ("text", "string", HARD["text"])),
            "\n" + _k3_call("get_weather", ("where", "object", '{"at": [1, {"x": null}]}'), ("days", "number", " 3\n")),
        )
        + "\n",
        "Two.",
        [("write_file", HARD), weather({"where": {"at": [1, {"x": None}]}, "days": 3})],
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
        calls=[weather({"city": "Par]is", "days": "3", "x": 7})],
    ),
    Transcript(
        '<|open|>call tool="get_weather"<|sep|><|open|>argument key="days"<|sep|>3<|close|>argument<|sep|>'
        '<|open|>argument key="city"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>' + _k3_call("now"),
        calls=[weather({"days": 3, "city": "3"}), ("now", {})],
    ),
    Transcript(
        _k3(_K3_JSON.format(name="write_file", json=HARD_JSON) + "<|close|>call<|sep|>"), calls=[("write_file", HARD)]
    ),
    Transcript(
        _k3(_k3_call("get_weather", ("city", "string", "<|open|>think<|sep|><|close|>call<|sep|>"))),
        calls=[weather({"city": "<|open|>think<|sep|><|close|>call<|sep|>"})],
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
