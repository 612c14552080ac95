"""What is asked: sessions of one or more turns, the same for the same seed. Used by `loadtest/runner.py`."""

import math
import random
from dataclasses import dataclass
from typing import Any

from loadtest import words
from loadtest.pictures import data_url
from loadtest.settings import Lengths, Shape
from loadtest.trace import TraceLine
from loadtest.words import Calibration

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request: messages to add to the conversation, and the tokens to ask for."""

    messages: tuple[Message, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Turns that one user takes one after another; answers stay in the conversation."""

    turns: tuple[Turn, ...]


def length(rng: random.Random, lengths: Lengths, mean: int, spread: float) -> int:
    """A number of tokens, at least 1, whose mean is `mean` (before rounding and that bound)."""
    if lengths == "uniform":
        drawn = rng.uniform(mean * (1 - spread), mean * (1 + spread))
    elif lengths == "normal":
        drawn = rng.gauss(mean, mean * spread)
    elif lengths == "lognormal":
        sigma = math.sqrt(math.log1p(spread**2))
        drawn = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    else:
        drawn = mean
    return max(1, round(drawn))


class Workload:
    """Makes the sessions of a run. The same level and index give the same session, in whatever order they are made."""

    def __init__(self, shape: Shape, calibration: Calibration) -> None:
        self._shape, self._calibration = shape, calibration

    def session(self, level: str, index: int) -> Session:
        """One session of a level; levels share no text, so that none profits from the one before."""
        shape = self._shape
        rng = random.Random(f"{shape.seed}/{level}/{index}")
        turns = [
            self._turn(rng, is_first=number == 0) for number in range(shape.turns if shape.workload == "chat" else 1)
        ]
        if shape.workload == "prefix":
            turns[0] = self._with_prefix(turns[0], level, index % shape.prefix_groups)
        return Session(turns=tuple(turns))

    def traced(self, line: TraceLine, index: int) -> Session:
        """The session of a line of a trace."""
        rng = random.Random(f"{self._shape.seed}/trace/{index}")
        num_words = self._calibration.num_words(line.input_tokens)
        messages = line.messages or ({"role": "user", "content": words.text(rng, num_words)},)
        return Session(turns=(Turn(messages=messages, output_tokens=line.output_tokens),))

    def _turn(self, rng: random.Random, *, is_first: bool) -> Turn:
        shape = self._shape
        tokens = length(rng, shape.lengths, shape.input_tokens, shape.spread)
        has_template = is_first and shape.workload != "prefix"
        count = self._calibration.num_words(tokens) if has_template else self._calibration.num_added_words(tokens)
        content: str | list[Message] = words.text(rng, count)
        if shape.workload == "images":
            content = [*self._images(rng), {"type": "text", "text": content}]
        output_tokens = length(rng, shape.lengths, shape.output_tokens, shape.spread)
        return Turn(messages=({"role": "user", "content": content},), output_tokens=output_tokens)

    def _images(self, rng: random.Random) -> list[Message]:
        shape = self._shape
        sizes = [shape.image_sizes[number % len(shape.image_sizes)] for number in range(shape.images)]
        urls = [data_url(rng, size, shape.image_format) for size in sizes]
        return [{"type": "image_url", "image_url": {"url": url}} for url in urls]

    def _with_prefix(self, turn: Turn, level: str, group: int) -> Turn:
        rng = random.Random(f"{self._shape.seed}/{level}/prefix {group}")
        prefix = words.text(rng, self._calibration.num_added_words(self._shape.prefix_tokens))
        messages = ({"role": "system", "content": prefix}, *turn.messages)
        return Turn(messages=messages, output_tokens=turn.output_tokens)
