"""Options of dataclasses: declared once as fields, read from the command line, FIRSTLIGHT_* variables and a YAML file.

Called by `server/config.py` in the supervisor. The command line wins over the environment, that over the file, that
over the default. Unknown keys are errors everywhere.
"""

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from scheduler.config import SPECULATIVE_METHODS, SpeculativeConfig

ENV_PREFIX = "FIRSTLIGHT_"
MAX_INTEGER = 2**63 - 1
"""What the JSON line to the child processes can carry."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class OptionError(Exception):
    """A value or key that the user must mend; the message names it."""


def parse_bytes(text: str) -> int:
    """'512MiB', '4g', '1000' -> bytes. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?|)b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 4GB")
    return int(float(match[1]) * _UNITS[match[2]])


def spell_bytes(size: int) -> str:
    """The shortest text that `parse_bytes` reads as this size: 134217728 -> '128MiB'."""
    unit = next((unit for unit in ("Ti", "Gi", "Mi", "Ki") if size and size % _UNITS[unit.lower()] == 0), None)
    return str(size) if unit is None else f"{size // _UNITS[unit.lower()]}{unit}B"


def parse_image_limit(text: str) -> int:
    """'{"image": 4}' or 'image=4' -> 4: vLLM's spelling, in which other kinds, that are not served, may only be 0.
    Raises ValueError."""
    mistake = ValueError(f'{text!r} is not of the form {{"image": 4}} or image=4')
    try:
        is_json = text.lstrip().startswith("{")
        limits = json.loads(text) if is_json else dict(pair.split("=") for pair in text.split(","))
    except (ValueError, RecursionError):
        raise mistake from None
    counts = {kind.strip(): str(value).strip() for kind, value in limits.items()}
    if not all(count.isdecimal() and count.isascii() for count in counts.values()):
        raise mistake
    for kind in sorted(counts.keys() - {"image"}):
        if kind not in ("video", "audio"):
            raise ValueError(f"{kind[:40]!r} is not image, video or audio")
        if int(counts[kind]) > 0:
            raise ValueError(f"{kind} is not served; its limit can only be 0")
    if "image" not in counts:
        raise ValueError(f"{text!r} does not say how many images a request may have, as image=4 does")
    return int(counts["image"])


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def _parse_list(text: str) -> tuple[str, ...]:
    """Empty text is an error: `--api-key "$KEY"` must not open the server to everybody when KEY is unset."""
    if not (parts := tuple(part.strip() for part in text.split(",") if part.strip())):
        raise ValueError("must not be empty")
    return parts


def _parse_number(text: str, kind: type[int] | type[float]) -> int | float:
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a {'whole ' if kind is int else ''}number") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite number")
    return value


def parse_speculation(text: str) -> SpeculativeConfig:
    """'{"method": "ngram", "num_speculative_tokens": 4}', in vLLM's names. Raises ValueError."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    for key in document.keys() - {field.name for field in fields(SpeculativeConfig)}:
        raise ValueError(f"{key[:40]!r} is unknown")
    if (method := document.get("method")) not in SPECULATIVE_METHODS:
        raise ValueError(f"method {str(method)[:40]!r} is not one of {', '.join(SPECULATIVE_METHODS)}")
    try:
        return msgspec.convert(document, SpeculativeConfig)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


_PARSERS = {"bytes": parse_bytes, "images": parse_image_limit, "speculation": parse_speculation}
"""By unit, where a value is written in another way than its type says."""
_MAPPINGS = ("images", "speculation")
"""Units that a file may write as a mapping."""


class Option:
    """One field of one section."""

    def __init__(self, section: type, field: "Field[Any]", annotation: Any) -> None:
        self.section, self.name, self.annotation = section, field.name, annotation
        self.help: str = field.metadata["help"]
        self.unit: str = field.metadata.get("unit", "")
        self.is_list = get_origin(annotation) is tuple
        assert field.default is not MISSING, f"option {field.name} needs a default"
        self.default = field.default

    @property
    def flag(self) -> str:
        """--max-num-seqs"""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """FIRSTLIGHT_MAX_NUM_SEQS"""
        return ENV_PREFIX + self.name.upper()

    def parse(self, text: str) -> Any:
        """The value that `text` means. Raises ValueError."""
        if self.is_list:
            return _parse_list(text)
        if self.unit in _PARSERS:
            return _PARSERS[self.unit](text)
        if self.annotation is bool:
            return _parse_bool(text)
        if get_origin(self.annotation) is Literal:
            if text not in get_args(self.annotation):
                raise ValueError(f"{text!r} is not one of {', '.join(get_args(self.annotation))}")
            return text
        if self.annotation in (int, float):
            return _parse_number(text, self.annotation)
        return self.annotation(text)

    def convert(self, value: object, where: str) -> Any:
        """The value for a scalar or list from a file, a variable or the command line. Raises OptionError."""
        try:
            if isinstance(value, list) and self.is_list:
                return tuple(part for item in value for part in self.parse(str(item)))
            if isinstance(value, dict) and self.unit in _MAPPINGS:
                value = json.dumps(value)
            if value is None or isinstance(value, list | dict):
                raise ValueError(f"cannot be {type(value).__name__}")
            parsed = self.parse(str(value))
        except (ValueError, OverflowError) as error:
            raise OptionError(f"{where}: {error}") from None
        if isinstance(parsed, int) and abs(parsed) > MAX_INTEGER:
            raise OptionError(f"{where}: {value} is too large")
        return parsed

    def add_to(self, group: "argparse._ArgumentGroup") -> None:
        """Declare the command-line flag; its value stays text until `convert`."""
        default = spell_bytes(self.default) if self.unit == "bytes" else self.default
        shown = "" if self.default in ("", (), None) else f" (default: {default})"
        text = (self.help + shown).replace("%", "%%")
        if self.annotation is bool:
            group.add_argument(self.flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif get_origin(self.annotation) is Literal:
            group.add_argument(self.flag, choices=get_args(self.annotation), default=None, help=text)
        elif self.is_list:
            group.add_argument(self.flag, action="append", default=None, metavar="VALUE", help=text + "; may repeat")
        else:
            metavar = self.unit.upper() or self.annotation.__name__.upper()
            group.add_argument(self.flag, default=None, metavar=metavar, help=text)


def options_of(sections: Sequence[type]) -> list[Option]:
    """The options of several dataclasses; a name declared twice is an assertion."""
    found = [
        Option(section, field, get_type_hints(section)[field.name]) for section in sections for field in fields(section)
    ]
    names = [option.name for option in found]
    assert len(set(names)) == len(names), "an option is declared twice"
    return found


def collect(
    options: Sequence[Option],
    arguments: Mapping[str, object],
    environment: Mapping[str, str],
    document: Mapping[str, object],
) -> dict[type, dict[str, Any]]:
    """Values by section, from the three sources in order. Raises OptionError naming the source and key."""
    by_name = {option.name: option for option in options}
    values: dict[type, dict[str, Any]] = {option.section: {} for option in options}
    for key, value in document.items():
        option = by_name.get(str(key).replace("-", "_"))
        if option is None:
            raise OptionError(f"the configuration file has an unknown key {key!r}")
        values[option.section][option.name] = option.convert(value, f"configuration file, {key}")
    for option in options:
        if option.variable in environment:
            converted = option.convert(environment[option.variable], option.variable)
            values[option.section][option.name] = converted
        if (given := arguments.get(option.name)) is not None:
            values[option.section][option.name] = option.convert(given, option.flag)
    return values
