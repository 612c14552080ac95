"""What `firstlight validate` makes of answers about pictures, held against those recorded with the weights."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from server.embedded import EXAMINATION
from server.validate import eyes
from vision.embedded.examine import Item, drawn_items, is_right
from vision.embedded.figures import Recorded

TASKS = drawn_items()


def gate(mmproj: Path, questions: int = 16) -> Any:
    runtime = SimpleNamespace(mmproj=str(mmproj))
    return SimpleNamespace(
        is_embedded=True,
        config=SimpleNamespace(runtime=runtime),
        effort=SimpleNamespace(seen_questions=questions),
        told=lambda done, what: None,
    )


def served(wrong: str = "") -> httpx.Client:
    """One that knows every answer, but for those of a task."""
    known = {(item.picture, item.question.text): item for asked in TASKS.values() for item in asked}
    wrongly = {(item.picture, item.question.text) for item in TASKS.get(wrong, ())}

    def answer(request: httpx.Request) -> httpx.Response:
        parts = {part["type"]: part for part in json.loads(request.content)["messages"][0]["content"]}
        picture = base64.b64decode(parts["image_url"]["image_url"]["url"].partition(",")[2])
        key = picture, parts["text"]["text"]
        said = "mud" if key in wrongly else known[key].question.answer
        return httpx.Response(200, json={"choices": [{"message": {"content": said}}]})

    return httpx.Client(base_url="http://t", transport=httpx.MockTransport(answer))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights that answered everything, with their record."""
    file = tmp_path / "examination.json"
    recorded = Recorded.of({task: [True] * len(asked) for task, asked in TASKS.items()})
    file.write_bytes(msgspec.json.encode(recorded))
    monkeypatch.setattr(eyes, "EYES", tmp_path)
    monkeypatch.setattr(eyes, "EXAMINATION", file)
    return tmp_path


def test_as_many_right_answers_as_recorded_pass(folder: Path) -> None:
    check, (table,) = eyes.seen(gate(folder), served(), "m")
    asked = sum(map(len, TASKS.values()))
    assert (check.outcome, check.value) == ("passed", f"{asked} of {asked}")
    assert table.rows[0] == ("count", 16, 16, 16) and len(table.rows) == len(TASKS)
    check, _ = eyes.seen(gate(folder, questions=4), served(), "m")
    assert check.value == f"{4 * len(TASKS)} of {4 * len(TASKS)}"


def test_one_task_that_is_lost_fails(folder: Path) -> None:
    check, (table,) = eyes.seen(gate(folder), served(wrong="shape among several"), "m")
    assert check.outcome == "failed" and "shape among several: 0 of 16, not 16" in check.reason
    assert ("shape among several", 16, 0, 16) in table.rows


def test_what_is_recorded_as_wrong_may_be_wrong(folder: Path) -> None:
    right = {task: [True] * 16 for task in TASKS}
    expected = {**right, "colour": [False] * 16}
    assert eyes.compared(expected, expected)[0].outcome == "passed"
    assert eyes.compared(right, expected)[0].outcome == "passed"
    two_each = {task: [False] * 2 + [True] * 14 for task in TASKS}
    found = eyes.compared(two_each, right)[0]
    assert (
        found.outcome == "failed"
        and found.reason == f"{14 * len(TASKS)} right answers, and {16 * len(TASKS)} are recorded"
    )


@pytest.mark.parametrize("change", ["another folder", "not recorded", "another model"])
def test_others_are_not_asked(folder: Path, change: str) -> None:
    asked = gate(folder / "other" if change == "another folder" else folder)
    asked.is_embedded = change != "another model"
    if change == "not recorded":
        eyes.EXAMINATION.unlink()
    check, tables = eyes.seen(asked, served(), "m")
    assert check.outcome == "skipped" and tables == ()


@pytest.mark.skipif(not EXAMINATION.is_file(), reason="the embedded model has no image side yet")
def test_the_record_is_of_these_questions() -> None:
    recorded = msgspec.json.decode(EXAMINATION.read_bytes(), type=Recorded)
    assert {task: len(marks) for task, marks in recorded.tasks.items()} == dict.fromkeys(TASKS, 16)


def test_the_teacher_is_right() -> None:
    every: list[Item] = [item for asked in TASKS.values() for item in asked]
    assert all(is_right(item, item.question.answer) for item in every)
