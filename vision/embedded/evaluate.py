"""`python -m vision.embedded.evaluate`: asks a running server about pictures and counts right answers by task.

A tool and a client like any other: it knows the server by its URL. Pictures come from the evaluation's split.
"""

import argparse
import asyncio
import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
from PIL import Image

from vision.embedded.examine import CONTROLS, Item, controls, is_right, items
from vision.embedded.painter import EVALUATION, UNSEEN_VENDOR, load_painter
from vision.embedded.scene import Scene

TIMEOUT_S = 120.0
MAX_TOKENS = 48


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(prog="python -m vision.embedded.evaluate", description=__doc__)
    found.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    found.add_argument("--model", required=True, help="as the server calls it")
    found.add_argument("--cache", type=Path, required=True, help="icons and fonts, as for the training")
    found.add_argument("--items", type=int, default=500, help="questions a task")
    found.add_argument("--concurrency", type=int, default=8)
    found.add_argument("--control", choices=CONTROLS, help="show the next picture or a gray one: what guessing gives")
    found.add_argument("--out", type=Path, help="JSON file for the figures")
    return found


def data_url(scene: Scene) -> str:
    """The picture as PNG."""
    file = io.BytesIO()
    Image.fromarray(scene.pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def body(model: str, item: Item, *, question_first: bool) -> dict[str, object]:
    """Of a chat request with a picture and a question."""
    image = {"type": "image_url", "image_url": {"url": data_url(item.scene)}}
    text = {"type": "text", "text": item.question.text}
    messages = [{"role": "user", "content": [text, image] if question_first else [image, text]}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}


async def ask(client: httpx.AsyncClient, model: str, asked: Sequence[Item], concurrency: int) -> list[str]:
    """What the server says to each; every second question stands before its picture. Raises httpx.HTTPError."""
    slots = asyncio.Semaphore(concurrency)

    async def one(item: Item, question_first: bool) -> str:
        async with slots:
            request = body(model, item, question_first=question_first)
            response = await client.post("/v1/chat/completions", json=request)
        response.raise_for_status()
        said: str = response.json()["choices"][0]["message"]["content"]
        return said

    return list(await asyncio.gather(*(one(item, i % 2 == 1) for i, item in enumerate(asked))))


async def evaluate(
    client: httpx.AsyncClient, model: str, tasks: Mapping[str, Sequence[Item]], concurrency: int, control: str | None
) -> dict[str, tuple[float, int]]:
    """By task the share of right answers and the number of questions."""
    found = {}
    for task, asked in tasks.items():
        said = await ask(client, model, controls(asked, control) if control else asked, concurrency)
        right = [is_right(item, text) for item, text in zip(asked, said, strict=True)]
        found[task] = round(sum(right) / len(right), 4), len(right)
        print(f"{task:24} {found[task][0]:.3f} of {found[task][1]}", flush=True)
    return found


async def run(options: argparse.Namespace) -> dict[str, tuple[float, int]]:
    """All tasks; icons of the unseen vendor last."""
    tasks = items(load_painter(EVALUATION, options.cache), options.items)
    unseen = items(load_painter(UNSEEN_VENDOR, options.cache), options.items, ("icon",))
    tasks["icon of an unseen vendor"] = unseen["icon"]
    async with httpx.AsyncClient(base_url=options.url, timeout=TIMEOUT_S) as client:
        return await evaluate(client, options.model, tasks, options.concurrency, options.control)


def main() -> None:
    """Prints a line a task."""
    options = parser().parse_args()
    found = asyncio.run(run(options))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
