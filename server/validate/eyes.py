"""What the embedded model sees: right answers about drawn pictures against those that were recorded with its weights.

The pictures are those of the examination of the training that need no packages (`vision/embedded/examine.py`); the
recorded answers were written by `python -m vision.embedded.evaluate --record` and lie beside the weights.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec

from server.embedded import EXAMINATION, EYES
from server.validate.asking import chat
from server.validate.gate import Gate
from server.validate.result import Check, Table, checked, skipped
from vision.embedded.examine import Item, body, drawn_items, is_right
from vision.embedded.figures import Recorded

NAME = "answers about drawn pictures"
AT_ONCE = 16
MISTAKES = 0.05
"""Share of the questions that may be answered worse than recorded: another precision changes some."""
TASK_MISTAKES = 0.25
"""The same of one task."""


def seen(gate: Gate, http: httpx.Client, model: str) -> tuple[Check, tuple[Table, ...]]:
    """Raises Refused, httpx.HTTPError."""
    if not gate.is_embedded or Path(gate.config.runtime.mmproj) != EYES or not EXAMINATION.is_file():
        return skipped(NAME, "they are known of the image side that comes with the embedded model only"), ()
    recorded = msgspec.json.decode(EXAMINATION.read_bytes(), type=Recorded)
    tasks = {task: asked[: gate.effort.seen_questions] for task, asked in drawn_items().items()}
    gate.told(0.7, "questions about what pictures show")
    right = _answers(http, model, tasks)
    expected = {task: [mark == "1" for mark in recorded.tasks[task]][: len(asked)] for task, asked in tasks.items()}
    return compared(right, expected)


def _answers(http: httpx.Client, model: str, tasks: Mapping[str, Sequence[Item]]) -> dict[str, list[bool]]:
    def is_answered(item: Item) -> bool:
        return is_right(item, chat(http, body(model, item))["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {task: list(pool.map(is_answered, asked)) for task, asked in tasks.items()}


def compared(
    right: Mapping[str, Sequence[bool]], expected: Mapping[str, Sequence[bool]]
) -> tuple[Check, tuple[Table, ...]]:
    """Fewer right answers than recorded, altogether or in one task."""
    asked = sum(map(len, right.values()))
    found, wanted = (sum(map(sum, by.values())) for by in (right, expected))
    least = wanted - int(MISTAKES * asked)
    worse = [
        f"{task}: {sum(each)} of {len(each)}, not {sum(expected[task])}"
        for task, each in right.items()
        if sum(each) < sum(expected[task]) - max(1, int(TASK_MISTAKES * len(each)))
    ]
    problems = ([f"{found} right answers, and {wanted} are recorded"] if found < least else []) + worse
    advice = "the tower, the projector, the adapter, or how pictures are resized: firstlight align names the first"
    check = checked(NAME, "; ".join(problems), advice, f"{found} of {asked}", f"at least {least}")
    rows = tuple((task, len(each), sum(each), sum(expected[task])) for task, each in right.items())
    return check, (Table(head=("task", "questions", "right", "recorded"), rows=rows),)
