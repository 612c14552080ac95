"""The examination: pictures and questions by task, the same at every run, and which answers count as right.

Used by `evaluate.py`, and by `firstlight validate`, which asks the questions that need neither icons nor typefaces.
What is compared is how an answer begins: its first words, without regard to capitals and full stops.
"""

import base64
import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from vision.embedded.canvas import SIDE
from vision.embedded.painter import EVALUATION, MOST_SHAPES, Painter
from vision.embedded.questions import Question, questions
from vision.embedded.scene import Scene
from vision.embedded.vocabulary import COLOUR_NAMES, SCENES, SHAPES, SIZES

SEED = 30_000_001
"""Of the pictures; neither the training's nor that of its measures."""
CONTROLS = ("shuffled", "blank")
"""What guessing gives: the same questions about another picture, or about a gray one."""
GRAY = 128
MOST_PICTURES = 12
"""For each question of a task: of the rarest there is one in nine pictures."""
BALANCED = "count"
"""The task of which every answer is right equally often, though three of five pictures have one shape."""
DRAWN, DRAWN_ITEMS = ("shapes", "chart"), 16
"""Kinds of pictures that need no packages, and how many questions of their tasks are asked where all shall be quick."""
LONG, SHORT = 48, 12
"""Tokens of a caption, and of other answers."""


@dataclass(frozen=True, slots=True)
class Item:
    """A question about a picture."""

    picture: bytes
    """PNG."""
    question: Question
    pairs: frozenset[tuple[str, str]] = frozenset()
    """Colours and shapes that a caption must name beside each other, in any order of the things; if there are none, it
    must be the answer."""
    question_first: bool = False


Tasks = Mapping[str, Sequence[Item]]


def items(painter: Painter, count: int, kinds: Sequence[str] = SCENES) -> dict[str, list[Item]]:
    """At most `count` by task; pictures are made until each task of their kind has as many. Every second question
    stands before its picture."""
    found: dict[str, list[Item]] = {}
    for kind in kinds:
        here: dict[str, list[Item]] = {}
        for index in range(MOST_PICTURES * count):
            for task, item in _asked(painter.scene(SEED, index, kind), index):
                known = here.setdefault(task, [])
                if len(known) < count and (task != BALANCED or _is_rare(item, known, count)):
                    known.append(replace(item, question_first=len(known) % 2 == 1))
            if index >= count and all(len(each) == count for each in here.values()):
                break
        for task, each in here.items():
            found[task] = (found.get(task, []) + each)[:count]
    return found


def _is_rare(item: Item, known: Sequence[Item], count: int) -> bool:
    alike = sum(other.question.answer == item.question.answer for other in known)
    return alike < -(-count // MOST_SHAPES)


def _asked(scene: Scene, index: int) -> Iterator[tuple[str, Item]]:
    """Everything that is asked of a picture, under the names of its tasks."""
    picture = png(scene.pixels)
    pairs = frozenset((COLOUR_NAMES[thing.colour], SHAPES[thing.shape]) for thing in scene.things)
    for question in questions(np.random.default_rng((SEED, index, 2)), scene):
        names_pairs = question.task == "caption" and scene.kind == "shapes"
        item = Item(picture, question, pairs if names_pairs else frozenset())
        yield from ((task, item) for task in _tasks(scene, question))


def _tasks(scene: Scene, question: Question) -> list[str]:
    """Under which names a question counts."""
    if question.task == "caption":
        return [f"caption of {scene.kind}"]
    is_large = question.task == "shape" and scene.things[0].size == SIZES.index("large")
    return ["shape", "large shape"] if is_large else [question.task]


def drawn_items() -> dict[str, list[Item]]:
    """A few of each of the tasks that need no packages."""
    return items(Painter(EVALUATION, (), ()), DRAWN_ITEMS, DRAWN)


def png(pixels: np.ndarray) -> bytes:
    """A file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def body(model: str, item: Item) -> dict[str, object]:
    """Of a chat request with a picture and a question."""
    url = "data:image/png;base64," + base64.b64encode(item.picture).decode()
    image: dict[str, object] = {"type": "image_url", "image_url": {"url": url}}
    text: dict[str, object] = {"type": "text", "text": item.question.text}
    messages = [{"role": "user", "content": [text, image] if item.question_first else [image, text]}]
    most = LONG if item.question.task == "caption" else SHORT
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": most}


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.casefold())


def is_right(item: Item, said: str) -> bool:
    """Whether an answer begins with the wanted words; a caption of shapes names colour and shape of every thing, and no
    others."""
    words = _words(said)
    if item.pairs:
        pairs = itertools.pairwise(words)
        return item.pairs == {pair for pair in pairs if pair[0] in COLOUR_NAMES and pair[1] in SHAPES}
    wanted = _words(item.question.answer)
    return words[: len(wanted)] == wanted


def controls(asked: Sequence[Item], kind: str) -> list[Item]:
    """The same questions about a gray picture ("blank"), or about that of a question half as many further on
    ("shuffled"): the next ones are often about the same."""
    if kind == "blank":
        gray = png(np.full((SIDE, SIDE, 3), GRAY, np.uint8))
        return [replace(item, picture=gray) for item in asked]
    others = [asked[(i + len(asked) // 2) % len(asked)] for i in range(len(asked))]
    return [replace(item, picture=other.picture) for item, other in zip(asked, others, strict=True)]
