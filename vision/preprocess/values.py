"""Typed access to a preprocessor_config.json: the value, the default of the processor class, or an error with the key.

Called by the `read` functions of the recipes while a checkpoint is opened. Standard library and Pillow only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from PIL import Image

from vision.preprocess.common import Finish

Json = Mapping[str, object]

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)

MAX_SIDE = 1 << 14
"""Pixels of a side that a configuration may ask for."""


LARGEST = 1e9
"""More than any number of a configuration."""


class PreprocessorError(ValueError):
    """A preprocessor or processor configuration that is wrong or not supported; names the key."""


@dataclass(frozen=True, slots=True)
class Values:
    """A configuration object. A key that is null counts as missing, as transformers has it."""

    data: Json

    def fail(self, key: str, wanted: str) -> NoReturn:
        """Raises PreprocessorError: what the key holds, and what it should."""
        raise PreprocessorError(f"preprocessor: {key} must be {wanted}, not {self.data.get(key)!r}")

    def has(self, key: str) -> bool:
        """Whether the key holds something."""
        return self.data.get(key) is not None

    def integer(self, key: str, default: int, *, most: int = MAX_SIDE) -> int:
        """A positive integer."""
        value = self.data[key] if self.has(key) else default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            self.fail(key, f"an integer from 1 to {most}")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number."""
        value = self.data[key] if self.has(key) else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST:
            self.fail(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.data[key] if self.has(key) else default
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.data[key] if self.has(key) else default
        if not isinstance(value, str):
            self.fail(key, "a string")
        return value

    def channels(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Three numbers, or one for all three."""
        value = self.data[key] if self.has(key) else default
        values = [value] * 3 if isinstance(value, int | float) else value
        if not isinstance(values, Sequence) or len(values) != 3 or not all(map(_is_number, values)):
            self.fail(key, "three numbers")
        return tuple(float(v) for v in values)

    def section(self, key: str) -> "Values":
        """An object inside; an empty one where it is missing."""
        value = self.data[key] if self.has(key) else {}
        if not isinstance(value, Mapping):
            self.fail(key, "an object")
        return Values(value)

    def edges(self, key: str) -> "Values":
        """The object of a size that its shortest and longest edge give; height and width mean something else."""
        size = self.section(key)
        if size.has("height") or size.has("width"):
            self.fail(key, "an object with shortest_edge or longest_edge")
        return size

    def square_or_pair(self, key: str, default: tuple[int, int]) -> tuple[int, int]:
        """(height, width), from an object, a list or one integer for both."""
        if not self.has(key):
            return default
        value = self.data[key]
        if isinstance(value, Mapping):
            inside = self.section(key)
            if not (inside.has("height") and inside.has("width")):
                self.fail(key, "an object with height and width")
            return inside.integer("height", 0), inside.integer("width", 0)
        pair = value if isinstance(value, list | tuple) else (value, value)
        if len(pair) != 2:
            self.fail(key, "one or two sides")
        both = Values({"height": pair[0], "width": pair[1]})
        return both.integer("height", 0), both.integer("width", 0)

    def finish(self, resample: Image.Resampling, mean: tuple[float, ...], std: tuple[float, ...]) -> Finish:
        """Filter, scale, mean and deviation, with the defaults of a processor class. Every recipe resizes, rescales and
        normalises; a configuration that leaves one out is refused."""
        for key in ("do_resize", "do_rescale", "do_normalize"):
            if not self.flag(key, True):
                self.fail(key, "true")
        filter_, known = self.data["resample"] if self.has("resample") else int(resample), sorted(Image.Resampling)
        if isinstance(filter_, bool) or not isinstance(filter_, int) or filter_ not in known:
            self.fail("resample", f"one of {[int(each) for each in known]}")
        std = self.channels("image_std", std)
        if min(std) < 1 / LARGEST:
            self.fail("image_std", "positive")
        scale = self.number("rescale_factor", 1 / 255)
        return Finish(resample=filter_, scale=scale, mean=self.channels("image_mean", mean), std=std)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and -LARGEST < value < LARGEST
