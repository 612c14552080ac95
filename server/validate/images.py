"""The image path: does an answer depend on what a picture shows, and on nothing else? Over HTTP.

Greedy answers of a chat about made pictures, with the log-probabilities of their tokens, which show a difference also
where the words are the same.
"""

import base64
import io
from dataclasses import dataclass

import httpx
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from server.validate import eyes
from server.validate.asking import Body, Refused, chat
from server.validate.gate import Gate
from server.validate.result import Check, StageResult, checked, skipped

SIDE = 224
OUTPUT_TOKENS = 12
TILE = 28
QUESTION = "What is in this picture?"
DIFFERENT = "the tower, the projector, or where the embeddings go: every picture looks the same to the model"
SAME = "what of an image depends on others: encoded together, evicted and encoded again, or taken from the cache"
LEAST_DIFFERENCE = 1e-4
"""Between log-probabilities of answers about different pictures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An answer about a picture."""

    text: str
    logprobs: tuple[float, ...]
    image_tokens: int


def run(gate: Gate) -> StageResult:
    """The stage. Raises Refused, httpx.HTTPError, ServerDidNotStart."""
    server = gate.server()
    http, name, tolerance = server.http, gate.facts().name, gate.tolerance(server)
    pictures = made_pictures()
    try:
        first = {kind: ask(http, name, picture, "first") for kind, picture in pictures.items()}
    except Refused as error:
        if takes_no_images(error):
            return StageResult(checks=(skipped("images", "the model takes none"),))
        raise
    gate.told(0.5, "the same pictures again, and beside others")
    cached = {kind: ask(http, name, picture, "first") for kind, picture in pictures.items()}
    cold = {kind: ask(http, name, picture, "cold") for kind, picture in reversed(pictures.items())}
    checks = [
        _differs("a blank picture is told from one that shows something", first["photo"], first["blank"]),
        _differs("a picture is told from its shuffled tiles", first["photo"], first["shuffled"]),
        _differs("two pictures of noise are told apart", first["noise"], first["other noise"]),
        _same("the same picture again", first, cached, tolerance),
        _same("the same picture, encoded again", first, cold, tolerance),
        _counted(first),
    ]
    check, tables = eyes.seen(gate, http, name)
    facts = (f"Pictures of {SIDE} x {SIDE} pixels, made for this purpose.",)
    return StageResult(checks=(*checks, check), facts=facts, tables=tables)


def takes_no_images(error: Refused) -> bool:
    """Whether that is why a picture was refused."""
    return error.status == httpx.codes.BAD_REQUEST and "image" in str(error)


def made_pictures() -> dict[str, bytes]:
    """PNG files: a scene of shapes, the same in shuffled tiles, one colour, and noise."""
    rng = np.random.default_rng(7)
    down, across = np.mgrid[0:SIDE, 0:SIDE]
    scene = np.stack([down * 255 // SIDE, across * 255 // SIDE, np.full_like(down, 90)], axis=-1).astype(np.uint8)
    scene[(down - 80) ** 2 + (across - 90) ** 2 < 45**2] = (230, 40, 30)
    scene[150:200, 120:200] = (20, 60, 220)
    count = SIDE // TILE
    tiles = scene.reshape(count, TILE, count, TILE, 3).swapaxes(1, 2).reshape(-1, TILE, TILE, 3)
    shuffled = rng.permutation(tiles).reshape(count, count, TILE, TILE, 3).swapaxes(1, 2).reshape(scene.shape)
    noises = [rng.integers(0, 256, scene.shape, dtype=np.uint8) for _ in range(2)]
    blank = np.full_like(scene, 127)
    made = {"photo": scene, "shuffled": shuffled, "blank": blank, "noise": noises[0], "other noise": noises[1]}
    return {name: _png(pixels) for name, pixels in made.items()}


def _png(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def ask(http: httpx.Client, model: str, picture: bytes, salt: str) -> Seen:
    """Raises Refused, httpx.HTTPError."""
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    body: Body = {"model": model, "messages": [{"role": "user", "content": content}], "cache_salt": salt}
    asked = {"temperature": 0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "logprobs": True}
    found = chat(http, body | asked)
    choice, details = found["choices"][0], found["usage"].get("prompt_tokens_details") or {}
    logprobs = (choice.get("logprobs") or {}).get("content") or ()
    return Seen(
        text=choice["message"]["content"] or "",
        logprobs=tuple(entry["logprob"] for entry in logprobs),
        image_tokens=details.get("image_tokens", 0),
    )


def distance(one: Seen, other: Seen) -> float:
    """Largest difference of log-probabilities; infinite where the words differ."""
    if one.text != other.text or len(one.logprobs) != len(other.logprobs):
        return float("inf")
    return max((abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)), default=0.0)


def _differs(name: str, one: Seen, other: Seen) -> Check:
    found = distance(one, other)
    problem = "" if found > LEAST_DIFFERENCE else "the answer and its log-probabilities are the same"
    value = "other words" if found == float("inf") else f"log-probabilities differ by {found:.2g}"
    return checked(name, problem, DIFFERENT, value, f"above {LEAST_DIFFERENCE}")


def _same(name: str, before: dict[str, Seen], after: dict[str, Seen], tolerance: float) -> Check:
    found = {kind: distance(before[kind], after[kind]) for kind in before}
    wrong = [kind for kind, value in found.items() if not value <= tolerance]
    problem = f"not so with {', '.join(wrong)}" if wrong else ""
    return checked(name, problem, SAME, f"{len(found) - len(wrong)} of {len(found)} equal")


def _counted(first: dict[str, Seen]) -> Check:
    counts = sorted({seen.image_tokens for seen in first.values()})
    problem = "" if len(counts) == 1 and counts[0] > 0 else f"pictures of one size have {counts} tokens"
    return checked("pictures of one size have as many tokens", problem, "vision/placeholders.py", f"{counts}")
