"""The examination: pictures and questions by task, the same at every run, and which answers count as right.

Used by `evaluate.py`. What is compared is how an answer begins: its first words, without regard to capitals and full
stops.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vision.embedded.painter import Painter
from vision.embedded.questions import Question, questions
from vision.embedded.scene import Scene
from vision.embedded.vocabulary import COLOUR_NAMES, SCENES, SHAPES

SEED = 30_000_001
"""Of the pictures; neither the training's nor that of its measures."""


@dataclass(frozen=True, slots=True)
class Item:
    """A question about a picture."""

    scene: Scene
    question: Question


def items(painter: Painter, count: int, kinds: Sequence[str] = SCENES) -> dict[str, list[Item]]:
    """At most `count` by task; pictures are made until each task of their kind has as many."""
    found: dict[str, list[Item]] = {}
    for kind in kinds:
        here: dict[str, list[Item]] = {}
        # of the rarest question there is one in six pictures
        for index in range(8 * count):
            scene = painter.scene(SEED, index, kind)
            for question in questions(np.random.default_rng((SEED, index, 2)), scene):
                task = f"caption of {kind}" if question.task == "caption" else question.task
                here.setdefault(task, [])
                if len(here[task]) < count:
                    here[task].append(Item(scene, question))
            if index >= count and all(len(each) == count for each in here.values()):
                break
        for task, each in here.items():
            found[task] = (found.get(task, []) + each)[:count]
    return found


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.casefold())


def is_right(item: Item, said: str) -> bool:
    """Whether an answer begins with the wanted words; a caption of shapes names colour and shape of every thing."""
    words = _words(said)
    if item.question.task == "caption" and item.scene.kind == "shapes":
        pairs = {(COLOUR_NAMES[thing.colour], SHAPES[thing.shape]) for thing in item.scene.things}
        return pairs <= set(itertools.pairwise(words))
    wanted = _words(item.question.answer)
    return words[: len(wanted)] == wanted


def controls(asked: Sequence[Item]) -> list[Item]:
    """The same questions about the next picture: what guessing gives."""
    return [Item(asked[(i + 1) % len(asked)].scene, item.question) for i, item in enumerate(asked)]
