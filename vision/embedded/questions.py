"""Questions about a scene and their answers, as the language model is to be taught and examined.

Called by the alignment and by the evaluation. Answers are short: what is compared is the whole answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vision.embedded.canvas import SIDE, Generator
from vision.embedded.scene import Scene, Thing
from vision.embedded.vocabulary import COLOUR_NAMES, ICON_NAMES, SHAPES

NUMBERS = ("one", "two", "three", "four", "five", "six")
MARGIN = 10
"""Pixels from the middle, for a thing to be on one side of it."""
VOWELS = "aeiou"


@dataclass(frozen=True, slots=True)
class Question:
    """One turn."""

    task: str
    text: str
    answer: str
    spelled: str = ""
    """What of the answer is said letter by letter: the picture shows letters, and nothing in it says which of them the
    tokenizer has as one token."""


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in VOWELS else 'a'} {noun}"


def _pick(random: Generator, texts: Sequence[str]) -> str:
    return texts[int(random.integers(len(texts)))]


def _middle(thing: Thing) -> tuple[float, float]:
    left, top, right, bottom = thing.box
    return (left + right) / 2, (top + bottom) / 2


def _named(thing: Thing) -> str:
    if thing.kind == "icon":
        return ICON_NAMES[thing.icon]
    return f"{COLOUR_NAMES[thing.colour]} {SHAPES[thing.shape]}"


def caption(scene: Scene) -> str:
    """A sentence."""
    if scene.kind in ("digits", "word"):
        return f'The {"number" if scene.kind == "digits" else "word"} "{scene.text.lower()}".'
    if scene.kind == "chart":
        return f"A bar chart with {NUMBERS[len(scene.things) - 1]} bars."
    names = [_article(_named(thing)) for thing in sorted(scene.things, key=lambda thing: _middle(thing)[0])]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{listed[0].upper()}{listed[1:]}."


def _places(random: Generator, thing: Thing, name: str) -> list[Question]:
    x, y = _middle(thing)
    found = []
    if abs(x - SIDE / 2) >= MARGIN:
        text = _pick(
            random, (f"Is the {name} on the left or on the right?", f"On which side is the {name}, left or right?")
        )
        found.append(Question("left or right", text, "left" if x < SIDE / 2 else "right"))
    if abs(y - SIDE / 2) >= MARGIN:
        text = _pick(random, (f"Is the {name} at the top or at the bottom?", f"Where is the {name}, top or bottom?"))
        found.append(Question("top or bottom", text, "top" if y < SIDE / 2 else "bottom"))
    return found


def _one_shape(random: Generator, thing: Thing) -> list[Question]:
    colours = ("What color is the shape?", "What colour is it?", "Which color does the shape have?", "Name the color.")
    shapes = ("What shape is it?", "What shape is this?", "Which shape is in the picture?", "Name the shape.")
    return [
        Question("colour", _pick(random, colours), COLOUR_NAMES[thing.colour]),
        Question("shape", _pick(random, shapes), SHAPES[thing.shape]),
        *_places(random, thing, "shape"),
    ]


def _several_shapes(random: Generator, things: Sequence[Thing]) -> list[Question]:
    found = []
    for thing in things:
        colour, shape = COLOUR_NAMES[thing.colour], SHAPES[thing.shape]
        if sum(other.shape == thing.shape for other in things) == 1:
            found.append(Question("colour among several", f"What color is the {shape}?", colour))
            found += _places(random, thing, shape)
        if sum(other.colour == thing.colour for other in things) == 1:
            found.append(Question("shape among several", f"What shape is {colour}?", shape))
    return found


def _present(random: Generator, things: Sequence[Thing]) -> Question:
    """Yes and no equally often."""
    here = {SHAPES[thing.shape] for thing in things}
    is_here = random.random() < 0.5
    shape = _pick(random, [shape for shape in SHAPES if (shape in here) == is_here])
    return Question("present", f"Is there {_article(shape)} in the picture?", "yes" if is_here else "no")


def _shapes(random: Generator, scene: Scene) -> list[Question]:
    counts = ("How many shapes are there?", "How many shapes are in the picture?", "Count the shapes.")
    found = [Question("count", _pick(random, counts), NUMBERS[len(scene.things) - 1]), _present(random, scene.things)]
    if len(scene.things) == 1:
        return found + _one_shape(random, scene.things[0])
    return found + _several_shapes(random, scene.things)


def _icons(random: Generator, scene: Scene) -> list[Question]:
    if len(scene.things) > 1:
        return [Question("count icons", "How many things are in the picture?", NUMBERS[len(scene.things) - 1])]
    thing = scene.things[0]
    texts = (
        "What is this?",
        "What does the picture show?",
        "What is in the picture?",
        "Name the thing in the picture.",
    )
    return [Question("icon", _pick(random, texts), ICON_NAMES[thing.icon]), *_places(random, thing, "thing")]


def _text(random: Generator, scene: Scene) -> list[Question]:
    numbers = ("What number is this?", "Which number is in the picture?", "Read the number.")
    words = ("What does the text say?", "Which word is this?", "Read the word.")
    is_number = scene.kind == "digits"
    text = scene.text.lower()
    return [Question(scene.kind, _pick(random, numbers if is_number else words), text, text)]


def _chart(random: Generator, scene: Scene) -> list[Question]:
    by_rank = {thing.rank: COLOUR_NAMES[thing.colour] for thing in scene.things}
    return [
        Question(
            "bars", _pick(random, ("How many bars are there?", "Count the bars.")), NUMBERS[len(scene.things) - 1]
        ),
        Question("tallest bar", "What color is the tallest bar?", by_rank[1]),
        Question("shortest bar", "What color is the shortest bar?", by_rank[2]),
    ]


def questions(random: Generator, scene: Scene) -> list[Question]:
    """All that are asked of a scene, a caption last."""
    asked = {"shapes": _shapes, "icon": _icons, "digits": _text, "word": _text, "chart": _chart}[scene.kind](
        random, scene
    )
    requests = ("Describe the picture.", "What do you see?", "Describe this image.")
    return [*asked, Question("caption", _pick(random, requests), caption(scene), scene.text.lower())]
