"""The examination counts what it should, over HTTP."""

import asyncio
import base64
import io
import json

import httpx
import numpy as np
import pytest
from PIL import Image

from vision.embedded.evaluate import evaluate
from vision.embedded.examine import Item, controls, is_right, items
from vision.embedded.painter import Painter
from vision.embedded.questions import Question
from vision.embedded.scene import Scene, Thing


def _scene(*things: Thing) -> Scene:
    zeros = np.zeros((128, 128, 3), np.uint8)
    return Scene(kind="shapes", pixels=zeros, owner=zeros[..., 0], things=things)


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [
        ("red", "Red.", True),
        ("red", "red, I think", True),
        ("red", "It is red.", False),
        ("red", "reddish", False),
        ("red", "", False),
        ("8944", "8944", True),
        ("8944", "8 9 4 4", False),
    ],
)
def test_an_answer_is_right_by_its_first_words(answer: str, said: str, right: bool) -> None:
    assert is_right(Item(_scene(), Question("task", "?", answer)), said) is right


def test_a_caption_names_every_thing() -> None:
    things = (
        Thing(kind="shape", box=(0, 0, 9, 9), colour=0, shape=0),
        Thing(kind="shape", box=(9, 9, 20, 20), colour=4, shape=3),
    )
    item = Item(_scene(*things), Question("caption", "Describe the picture.", "A red circle and a blue star."))
    assert is_right(item, "There are a blue star and a red circle.")
    assert not is_right(item, "A red star and a blue circle.")
    assert not is_right(item, "A red circle.")


def test_every_task_has_its_number_of_questions(evaluation_painter: Painter) -> None:
    tasks = items(evaluation_painter, 5)
    assert {task: len(asked) for task, asked in tasks.items()} == dict.fromkeys(tasks, 5)
    wanted = {"colour", "shape", "count", "left or right", "icon", "digits", "word", "tallest bar", "caption of chart"}
    assert wanted <= tasks.keys()
    assert all(item.scene.things[0].side >= 56 for item in tasks["large shape"])
    again = items(evaluation_painter, 5)
    assert [item.question for item in tasks["colour"]] == [item.question for item in again["colour"]]


def test_answers_are_asked_for_and_counted(evaluation_painter: Painter) -> None:
    """The server of the test knows each picture and its colour."""
    asked = items(evaluation_painter, 12, ("shapes",))["colour"]
    orders: list[str] = []
    known = {item.scene.pixels.tobytes(): item.question.answer for item in asked}

    def answer(request: httpx.Request) -> httpx.Response:
        sent = json.loads(request.content)
        image, text = sorted(sent["messages"][0]["content"], key=lambda part: part["type"])
        orders.append(sent["messages"][0]["content"][0]["type"])
        assert (sent["temperature"], sent["model"]) == (0, "m") and text["text"] in {i.question.text for i in asked}
        data = base64.b64decode(image["image_url"]["url"].partition(",")[2])
        pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        return httpx.Response(200, json={"choices": [{"message": {"content": f"{known[pixels.tobytes()].upper()}."}}]})

    async def run(control: str | None) -> tuple[float, int]:
        async with httpx.AsyncClient(base_url="http://test", transport=httpx.MockTransport(answer)) as client:
            return (await evaluate(client, "m", {"colour": asked}, 2, control))["colour"]

    assert asyncio.run(run(None)) == (1.0, 12)
    assert orders.count("text") == orders.count("image_url") == 6
    next_answers = [item.question.answer for item in (*asked[1:], asked[0])]
    by_chance = sum(item.question.answer == other for item, other in zip(asked, next_answers, strict=True))
    assert by_chance < 6
    assert asyncio.run(run("shuffled")) == (round(by_chance / 12, 4), 12)
    blank = controls(asked, "blank")
    assert [item.question for item in blank] == [item.question for item in asked]
    assert all((item.scene.pixels == 128).all() for item in blank)
