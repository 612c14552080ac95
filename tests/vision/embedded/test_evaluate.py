"""The examination counts what it should, over HTTP."""

import asyncio
import base64
import io
import json
import sys
from collections import Counter
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image

from vision.embedded import evaluate as command
from vision.embedded.evaluate import ask, evaluate, with_controls
from vision.embedded.examine import Item, controls, drawn_items, is_right, items
from vision.embedded.figures import Figures, Recorded, Score, as_table, with_figures
from vision.embedded.painter import Painter
from vision.embedded.questions import Question

PAIRS = frozenset({("red", "circle"), ("blue", "star")})


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
    assert is_right(Item(b"", Question("task", "?", answer)), said) is right


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("There are a blue star and a red circle.", True),
        ("A red star and a blue circle.", False),
        ("A red circle.", False),
        ("A red circle, a blue star and a green square.", False),
    ],
)
def test_a_caption_names_every_thing_and_no_other(said: str, right: bool) -> None:
    item = Item(b"", Question("caption", "Describe the picture.", "A red circle and a blue star."), PAIRS)
    assert is_right(item, said) is right


def test_every_task_has_its_number_of_questions(evaluation_painter: Painter) -> None:
    tasks = items(evaluation_painter, 8)
    assert {task: len(asked) for task, asked in tasks.items()} == dict.fromkeys(tasks, 8)
    wanted = {"colour", "shape", "large shape", "count", "left or right", "top or bottom", "icon", "digits", "word"}
    assert wanted | {"colour among several", "bars", "tallest bar", "caption of shapes", "caption of chart"} <= {*tasks}
    assert Counter(item.question.answer for item in tasks["count"]) == dict.fromkeys(("one", "two", "three", "four"), 2)
    assert all([item.question_first for item in asked] == [False, True] * 4 for asked in tasks.values())
    assert items(evaluation_painter, 8) == tasks
    assert all(len(item.pairs) > 0 for item in tasks["caption of shapes"]) and not tasks["caption of chart"][0].pairs


def test_some_need_no_packages() -> None:
    tasks = drawn_items()
    assert "icon" not in tasks and {"colour", "count", "shape among several", "tallest bar"} <= tasks.keys()
    assert {len(asked) for asked in tasks.values()} == {16}
    again = {item.picture for asked in drawn_items().values() for item in asked}
    assert {item.picture for asked in tasks.values() for item in asked} == again


def pixels_of(picture: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))


def test_controls_show_something_else(evaluation_painter: Painter) -> None:
    asked = items(evaluation_painter, 12, ("shapes",))["left or right"]
    shuffled, blank = controls(asked, "shuffled"), controls(asked, "blank")
    for changed in (shuffled, blank):
        assert [item.question for item in changed] == [item.question for item in asked]
        assert not any(one.picture == other.picture for one, other in zip(asked, changed, strict=True))
    assert all((pixels_of(item.picture) == 128).all() for item in blank)
    assert {item.picture for item in shuffled} == {item.picture for item in asked}


class Teacher:
    """A server that knows each picture's colour."""

    def __init__(self, asked: list[Item]) -> None:
        self.known = {item.picture: item.question.answer for item in asked}
        self.first: list[str] = []
        self.pictures: list[bytes] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        sent = json.loads(request.content)
        parts = sent["messages"][0]["content"]
        self.first.append(parts[0]["type"])
        image = next(part for part in parts if part["type"] == "image_url")
        assert (sent["temperature"], sent["model"], sent["max_tokens"]) == (0, "m", 12)
        self.pictures.append(base64.b64decode(image["image_url"]["url"].partition(",")[2]))
        said = self.known.get(self.pictures[-1], "gray")
        return httpx.Response(200, json={"choices": [{"message": {"content": f"{said.upper()}."}}]})


def test_answers_are_asked_for_and_counted(evaluation_painter: Painter) -> None:
    asked = items(evaluation_painter, 12, ("shapes",))["colour"]
    teacher, told = Teacher(asked), Counter[str]()

    async def run() -> dict[str, list[bool]]:
        async with httpx.AsyncClient(base_url="http://t", transport=httpx.MockTransport(teacher.answer)) as client:
            found = {}
            for kind, tasks in with_controls({"colour": asked}, 10).items():
                by_task = await evaluate(client, "m", tasks, 2, lambda count: told.update(done=count))
                found[kind] = by_task["colour"]
            return found

    right = asyncio.run(run())
    assert right["picture"] == [True] * 12 and told["done"] == 12 + 10 + 10
    assert Counter(teacher.first[:12]) == {"text": 6, "image_url": 6}
    spread = [item.question.answer for place, item in enumerate(asked) if place not in (5, 11)]
    shuffled = [answer == other for answer, other in zip(spread, spread[5:] + spread[:5], strict=True)]
    assert (right["shuffled"], right["blank"]) == (shuffled, [answer == "gray" for answer in spread])


def test_questions_about_a_picture_come_together(evaluation_painter: Painter) -> None:
    """So that it is encoded once."""
    tasks = items(evaluation_painter, 6, ("shapes",))
    asked = [item for task in ("colour", "shape") for item in tasks[task]]
    teacher = Teacher(asked)

    async def run() -> None:
        async with httpx.AsyncClient(base_url="http://t", transport=httpx.MockTransport(teacher.answer)) as client:
            await ask(client, "m", asked, 1, lambda count: None)

    asyncio.run(run())
    changes = sum(one != other for one, other in zip(teacher.pictures, teacher.pictures[1:], strict=False))
    assert changes == len({item.picture for item in asked}) - 1


def test_figures_are_shown() -> None:
    scores = {"picture": {"colour": Score(450, 500), "icon": Score(500, 500)}}
    scores |= {"blank": {"colour": Score(20, 200), "icon": Score(0, 200)}}
    table = as_table(Figures("m", scores))
    assert [cell.strip() for cell in table.splitlines()[2].split("|")[1:-1]] == [
        "colour",
        "90.0% ± 2.9",
        "500",
        "10.0% ± 4.9",
    ]
    assert "100.0% ± 0.8" in table.splitlines()[3]
    begin, end = "<!-- figures: written by vision.embedded.evaluate --card -->", "<!-- end of figures -->"
    once = with_figures(f"before\n{begin}\nnothing yet\n{end}\nafter\n", Figures("m", scores))
    assert once == with_figures(once, Figures("m", scores)) and table in once and "nothing yet" not in once
    with pytest.raises(ValueError, match="the card lacks"):
        with_figures("no place", Figures("m", scores))


def test_the_command_records_what_validate_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server that calls everything red."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        return httpx.Response(200, json={"choices": [{"message": {"content": "red"}}]})

    client = httpx.AsyncClient(base_url="http://t", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(command.httpx, "AsyncClient", lambda **options: client)
    file = tmp_path / "recorded.json"
    monkeypatch.setattr(sys, "argv", ["evaluate", "--record", str(file), "--out", str(tmp_path / "figures.json")])
    command.main()
    recorded, tasks = msgspec.json.decode(file.read_bytes(), type=Recorded).tasks, drawn_items()
    assert recorded["colour"] == "".join(str(int(item.question.answer == "red")) for item in tasks["colour"])
    assert recorded.keys() == tasks.keys() and set(recorded["count"]) == {"0"}
    figures = msgspec.json.decode((tmp_path / "figures.json").read_bytes(), type=Figures)
    assert figures.model == "m" and figures.scores["picture"]["count"] == Score(0, 16)


def test_what_goes_wrong_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(400, text="it does not accept images"))
    client = httpx.AsyncClient(base_url="http://t", transport=transport)
    monkeypatch.setattr(command.httpx, "AsyncClient", lambda **options: client)
    monkeypatch.setattr(sys, "argv", ["evaluate", "--model", "m", "--record", "unused.json"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 1 and "it does not accept images" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["evaluate"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2 and "--cache is needed" in capsys.readouterr().err
