"""Pictures are the same for the same numbers, and show what they say they show."""

import numpy as np
import pytest

from vision.embedded.canvas import MIN_CONTRAST, SIDE
from vision.embedded.painter import EVALUATION, TRAIN, Painter
from vision.embedded.questions import NUMBERS, questions
from vision.embedded.scene import NONE, Scene, Thing
from vision.embedded.targets import MASK_SIDE, patch_owners, targets
from vision.embedded.vocabulary import COLOUR_NAMES, COLOURS, GLYPHS, HEADS, KINDS, SCENES

PATCH = 16
SEED = 3


@pytest.mark.parametrize("kind", SCENES)
def test_a_picture_follows_from_its_numbers(painter: Painter, kind: str) -> None:
    one, again, other = (painter.scene(SEED, index, kind) for index in (5, 5, 6))
    assert one.things == again.things
    assert np.array_equal(one.pixels, again.pixels) and np.array_equal(one.owner, again.owner)
    assert not np.array_equal(one.pixels, other.pixels)


@pytest.mark.parametrize("kind", SCENES)
def test_every_thing_is_where_its_box_is_in_its_colour(painter: Painter, kind: str) -> None:
    for index in range(20):
        scene = painter.scene(SEED, index, kind)
        assert scene.pixels.shape == (SIDE, SIDE, 3) and scene.owner.max() == len(scene.things)
        for number, thing in enumerate(scene.things, 1):
            rows, columns = np.nonzero(scene.owner == number)
            left, top, right, bottom = thing.box
            assert len(rows) >= 20, (kind, index, number)
            assert left <= columns.min() and columns.max() < right and top <= rows.min() and rows.max() < bottom
            if thing.colour != NONE:
                seen = np.median(scene.pixels[rows, columns].astype(float), axis=0)
                assert np.linalg.norm(seen - COLOURS[COLOUR_NAMES[thing.colour]]) < MIN_CONTRAST, (kind, index)


def test_text_is_what_its_glyphs_say(painter: Painter) -> None:
    for kind in ("digits", "word"):
        scene = painter.scene(SEED, 1, kind)
        assert "".join(GLYPHS[thing.glyph] for thing in scene.things) == scene.text.lower()
        assert [thing.order for thing in scene.things] == list(range(len(scene.text)))


def test_the_tallest_bar_is_the_tallest(painter: Painter) -> None:
    for index in range(20):
        things = painter.scene(SEED, index, "chart").things
        tops = [thing.box[1] for thing in things]
        assert [thing.rank for thing in things].index(1) == int(np.argmin(tops))
        assert [thing.rank for thing in things].index(2) == int(np.argmax(tops))
        assert len({thing.colour for thing in things}) == len(things)


def test_the_evaluation_has_sizes_and_backgrounds_of_its_own(painter: Painter, evaluation_painter: Painter) -> None:
    def sides(one: Painter) -> set[int]:
        scenes = [one.scene(SEED, index, "shapes") for index in range(150)]
        return {thing.side for scene in scenes for thing in scene.things}

    assert not sides(painter) & sides(evaluation_painter)
    assert set(TRAIN.backgrounds) & set(EVALUATION.backgrounds) == {"solid"}
    assert not set(TRAIN.vendors) & {"twemoji"}


def _scene(owner: np.ndarray, things: tuple[Thing, ...]) -> Scene:
    return Scene(kind="shapes", pixels=np.zeros((SIDE, SIDE, 3), np.uint8), owner=owner, things=things)


def test_targets_of_two_squares() -> None:
    owner = np.zeros((SIDE, SIDE), np.uint8)
    owner[0:32, 0:32] = 1
    owner[64:80, 100:112] = 2
    # one pixel of the second lies on a patch of the first, too little to be on it
    owner[31, 31] = 2
    things = (
        Thing(kind="shape", box=(0, 0, 32, 32), colour=4, shape=1),
        Thing(kind="shape", box=(100, 64, 112, 80), colour=0, shape=1),
    )
    owners = patch_owners(owner, PATCH).reshape(8, 8)
    assert owners[0, 0] == owners[1, 1] == 1 and owners[4, 6] == 2 and int((owners > 0).sum()) == 5
    found = targets([_scene(owner, things)], PATCH)
    assert set(found.classes) == set(HEADS) and found.mask.shape == (1, 64, MASK_SIDE**2)
    kinds, colours = found.classes["kind"].reshape(8, 8), found.classes["colour"].reshape(8, 8)
    assert (kinds[0, 0], kinds[4, 6], kinds[7, 7]) == (KINDS.index("shape"), KINDS.index("shape"), 0)
    assert (colours[0, 0], colours[4, 6], colours[7, 7]) == (4, 0, NONE)
    assert set(found.classes["count"].flatten()) == {1}
    assert found.classes["column"].reshape(8, 8)[0].tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert found.classes["row"].reshape(8, 8)[:, 0].tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    weights = found.weights.reshape(8, 8)
    assert weights[0, 0] == 0.25 and weights[4, 6] == 1 and float(weights.sum()) == pytest.approx(2)
    # of the patch at (4, 6), columns 96 to 111, the things starts in the third cell
    mask = found.mask.reshape(8, 8, MASK_SIDE, MASK_SIDE)[4, 6]
    assert mask[0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]


def test_questions_are_answered_by_the_picture() -> None:
    things = (
        Thing(kind="shape", box=(90, 10, 120, 40), colour=4, shape=1),
        Thing(kind="shape", box=(0, 80, 30, 110), colour=0, shape=3),
        Thing(kind="shape", box=(50, 80, 80, 110), colour=0, shape=0),
    )
    asked = questions(np.random.default_rng(0), _scene(np.zeros((SIDE, SIDE), np.uint8), things))
    found = {question.text: question.answer for question in asked}
    by_task: dict[str, list[str]] = {}
    for question in asked:
        by_task.setdefault(question.task, []).append(question.answer)
    assert by_task["count"] == [NUMBERS[2]] and by_task["shape among several"] == ["square"]
    assert found["What shape is blue?"] == "square" and found["What color is the star?"] == "red"
    assert by_task["caption"] == ["A red star, a red circle and a blue square."]
    # the circle is in the middle, so nobody asks on which side it is
    assert by_task["left or right"] == ["right", "left"] and by_task["top or bottom"] == ["top", "bottom", "bottom"]
