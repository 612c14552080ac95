"""`python -m vision.embedded.evaluate`: asks a running server about pictures and counts right answers by task.

A tool and a client like any other: it knows the server by its URL. Pictures come from the evaluation's split.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vision.embedded.examine import CONTROLS, Item, Tasks, body, controls, drawn_items, is_right, items
from vision.embedded.figures import PICTURE, Figures, Recorded, Score, as_table, with_figures
from vision.embedded.painter import EVALUATION, UNSEEN_VENDOR, load_painter
from vision.embedded.sources import SourceError

TIMEOUT_S = 300.0
UNSEEN = "icon of an unseen vendor"

Told = Callable[[int], None]
"""Given how many more questions are answered."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(prog="python -m vision.embedded.evaluate", description=__doc__)
    found.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    found.add_argument("--model", help="as the server calls it (default: what it calls its first one)")
    found.add_argument("--cache", type=Path, help="icons and fonts, as for the training")
    found.add_argument("--items", type=int, default=500, help="questions a task")
    found.add_argument("--control-items", type=int, default=200, help="of them for each of the controls; 0: none")
    found.add_argument("--concurrency", type=int, default=16)
    found.add_argument("--out", type=Path, help="JSON file for the figures")
    found.add_argument("--card", type=Path, help="Markdown file whose table of figures is to be replaced")
    found.add_argument(
        "--record", type=Path, help="ask only what `firstlight validate` asks, and write its file of right answers"
    )
    return found


async def ask(client: httpx.AsyncClient, model: str, asked: Sequence[Item], concurrency: int, told: Told) -> list[bool]:
    """Whether the answer to each is right, in order; those about one picture are asked together. Raises
    httpx.HTTPError."""
    slots = asyncio.Semaphore(concurrency)
    pictures = {picture: place for place, picture in enumerate(dict.fromkeys(item.picture for item in asked))}
    right = [False] * len(asked)

    async def one(place: int) -> None:
        async with slots:
            response = await client.post("/v1/chat/completions", json=body(model, asked[place]))
        response.raise_for_status()
        right[place] = is_right(asked[place], response.json()["choices"][0]["message"]["content"])
        told(1)

    async with asyncio.TaskGroup() as group:
        for place in sorted(range(len(asked)), key=lambda place: pictures[asked[place].picture]):
            group.create_task(one(place))
    return right


async def evaluate(
    client: httpx.AsyncClient, model: str, tasks: Tasks, concurrency: int, told: Told
) -> dict[str, list[bool]]:
    """By task whether the answer to each of its questions is right."""
    right = await ask(client, model, [item for asked in tasks.values() for item in asked], concurrency, told)
    following = iter(right)
    return {task: [next(following) for _ in asked] for task, asked in tasks.items()}


def tasks_of(cache: Path, count: int) -> dict[str, list[Item]]:
    """All tasks; icons of the unseen vendor last. Raises SourceError."""
    tasks = items(load_painter(EVALUATION, cache), count)
    tasks[UNSEEN] = items(load_painter(UNSEEN_VENDOR, cache), count, ("icon",))["icon"]
    return tasks


def with_controls(tasks: Tasks, count: int) -> dict[str, Tasks]:
    """The examination, and `count` questions of each task with other pictures."""
    rounds: dict[str, Tasks] = {PICTURE: tasks}
    for kind in CONTROLS if count else ():
        rounds[kind] = {task: controls(_spread(asked, count), kind) for task, asked in tasks.items()}
    return rounds


def _spread(asked: Sequence[Item], count: int) -> list[Item]:
    """So many, as far apart as they can be: rare answers come last where all shall be right equally often."""
    count = min(count, len(asked))
    return [asked[i * len(asked) // count] for i in range(count)]


async def run(options: argparse.Namespace, rounds: Mapping[str, Tasks]) -> tuple[str, dict[str, dict[str, list[bool]]]]:
    """The model's name, and what is right by round and task. Raises httpx.HTTPError."""
    total = sum(len(asked) for tasks in rounds.values() for asked in tasks.values())
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    found = {}
    async with httpx.AsyncClient(base_url=options.url, timeout=TIMEOUT_S) as client:
        model = options.model or (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
        with Progress(*columns, console=Console(file=sys.stderr)) as progress:
            shown = progress.add_task("questions", total=total)
            for kind, tasks in rounds.items():
                progress.update(shown, description=kind)
                found[kind] = await evaluate(
                    client, model, tasks, options.concurrency, lambda count: progress.advance(shown, count)
                )
    return model, found


def main() -> None:
    """Prints a table, and writes what it is asked to."""
    arguments = parser()
    options = arguments.parse_args()
    if options.record is None and options.cache is None:
        arguments.error("--cache is needed for icons and fonts; without them there is --record")
    try:
        rounds = (
            {PICTURE: drawn_items()}
            if options.record is not None
            else with_controls(tasks_of(options.cache, options.items), options.control_items)
        )
        model, right = asyncio.run(run(options, rounds))
    except (SourceError, httpx.HTTPError, ExceptionGroup) as error:
        arguments.exit(1, f"{_words_of(error)}\n")
    scores = {kind: {task: Score(sum(each), len(each)) for task, each in by.items()} for kind, by in right.items()}
    figures = Figures(model=model, scores=scores)
    print(as_table(figures))
    if options.record is not None:
        options.record.write_bytes(msgspec.json.format(msgspec.json.encode(Recorded.of(right[PICTURE]))) + b"\n")
    if options.out is not None:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")
    if options.card is not None:
        options.card.write_text(with_figures(options.card.read_text(), figures))


def _words_of(error: Exception) -> str:
    """Of a group the first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    detail = error.response.text[:300] if isinstance(error, httpx.HTTPStatusError) else ""
    return f"{type(error).__name__}: {error} {detail}".strip()


if __name__ == "__main__":
    main()
