"""The examination: pictures and questions by task, the same at every run, and which answers count as right.

Used by `evaluate.py`. What is compared is how an answer begins: its first words, without regard to capitals and full
stops.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vision.embedded.painter import Painter
from vision.embedded.questions import Question, questions
from vision.embedded.scene import Scene
from vision.embedded.vocabulary import COLOUR_NAMES, SCENES, SHAPES, SIZES

SEED = 30_000_001
"""Of the pictures; neither the training's nor that of its measures."""
CONTROLS = ("shuffled", "blank")
GRAY = 128


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
                for task in _tasks(scene, question):
                    here.setdefault(task, [])
                    if len(here[task]) < count:
                        here[task].append(Item(scene, question))
            if index >= count and all(len(each) == count for each in here.values()):
                break
        for task, each in here.items():
            found[task] = (found.get(task, []) + each)[:count]
    return found


def _tasks(scene: Scene, question: Question) -> list[str]:
    """Under which names a question counts."""
    if question.task == "caption":
        return [f"caption of {scene.kind}"]
    is_large = question.task == "shape" and scene.things[0].size == SIZES.index("large")
    return ["shape", "large shape"] if is_large else [question.task]


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


def controls(asked: Sequence[Item], kind: str) -> list[Item]:
    """What guessing gives: the same questions about the next picture ("shuffled") or about a gray one ("blank")."""
    if kind == "blank":
        return [
            Item(replace(item.scene, pixels=np.full_like(item.scene.pixels, GRAY)), item.question) for item in asked
        ]
    return [Item(asked[(i + 1) % len(asked)].scene, item.question) for i, item in enumerate(asked)]
