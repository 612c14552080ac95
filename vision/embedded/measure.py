"""What the encoder alone tells apart, on pictures of the evaluation's split: the learning curve of its training.

Called now and then by the training, and by the gate, which holds the language model's answers against it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vision.embedded.heads import Heads, split_heads
from vision.embedded.painter import Painter
from vision.embedded.scene import Scene
from vision.embedded.targets import patch_owners, targets
from vision.embedded.tower import Tower
from vision.embedded.vocabulary import KINDS

BATCH = 64
SEED = 20_000_003
"""Of the pictures; training takes small ones."""
Int64 = npt.NDArray[np.int64]


@torch.no_grad()
def class_scores(tower: Tower, heads: Heads, scenes: Sequence[Scene]) -> list[dict[str, Tensor]]:
    """For each picture log-probabilities [P, classes] by head."""
    found = []
    for start in range(0, len(scenes), BATCH):
        logits = _logits(tower, heads, scenes[start : start + BATCH])
        by_head = {name: rows.log_softmax(dim=-1).cpu() for name, rows in split_heads(logits).items()}
        found += [{name: rows[i] for name, rows in by_head.items()} for i in range(len(logits))]
    return found


def _logits(tower: Tower, heads: Heads, scenes: Sequence[Scene]) -> Tensor:
    """[B, P, R]"""
    pixels = torch.from_numpy(np.stack([scene.pixels for scene in scenes])).to(heads.classes.weight.device)
    logits: Tensor = heads(tower(pixels))[0]
    return logits


@torch.no_grad()
def present_logits(tower: Tower, heads: Heads, scenes: Sequence[Scene]) -> dict[str, float]:
    """Of each head the mean logit of the class that is there; 0 where no picture asks it."""
    wanted = targets(scenes, tower.config.patch).classes
    sums: dict[str, list[float]] = {}
    for start in range(0, len(scenes), BATCH):
        for name, rows in split_heads(_logits(tower, heads, scenes[start : start + BATCH])).items():
            classes = torch.from_numpy(wanted[name][start : start + BATCH]).to(rows.device)
            there = classes >= 0
            sums.setdefault(name, []).extend(rows[there].gather(1, classes[there][:, None])[:, 0].tolist())
    return {name: sum(values) / max(1, len(values)) for name, values in sums.items()}


def single_answer(scores: dict[str, Tensor], head: str, kind: str) -> int:
    """The class of the only thing on a picture, without being told where it is: its most likely patches vote."""
    weights = scores["kind"][:, KINDS.index(kind)].exp()
    return int((scores[head] * weights[:, None]).sum(dim=0).argmax())


def _thing_answers(scores: dict[str, Tensor], scene: Scene, head: str, patch: int) -> list[bool]:
    """Whether each thing is recognised, being told where it is."""
    owners = torch.from_numpy(patch_owners(scene.owner, patch))
    found = []
    for number, thing in enumerate(scene.things):
        there = owners == number + 1
        wanted = thing.of_head(head)
        if wanted >= 0:
            found.append(bool(there.any()) and int(scores[head][there].sum(dim=0).argmax()) == wanted)
    return found


def _mean(values: Sequence[bool]) -> float:
    return round(sum(values) / len(values), 4) if values else float("nan")


def accuracies(tower: Tower, heads: Heads, painter: Painter, count: int) -> dict[str, float]:
    """Shares of right answers, of `count` pictures of each kind."""
    patch, found = tower.config.patch, {}
    shapes = [painter.scene(SEED, i, "shapes") for i in range(2 * count)]
    scores = class_scores(tower, heads, shapes)
    counts = [int(one["count"].sum(dim=0).argmax()) + 1 for one in scores]
    found["count"] = _mean([len(scene.things) == c for scene, c in zip(shapes, counts, strict=True)])
    single = [(scene, one) for scene, one in zip(shapes, scores, strict=True) if len(scene.things) == 1]
    for head in ("colour", "shape"):
        right = [single_answer(one, head, "shape") == scene.things[0].of_head(head) for scene, one in single]
        found[f"one {head}"] = _mean(right)
        big = [yes for yes, (scene, _) in zip(right, single, strict=True) if scene.things[0].size == 1]
        found[f"one large {head}"] = _mean(big)
        several = [
            yes
            for scene, one in zip(shapes, scores, strict=True)
            if len(scene.things) > 1
            for yes in _thing_answers(one, scene, head, patch)
        ]
        found[f"among several {head}"] = _mean(several)
    for kind, head in (("icon", "icon"), ("digits", "glyph"), ("word", "glyph"), ("chart", "rank")):
        scenes = [painter.scene(SEED, i, kind) for i in range(count)]
        each = zip(class_scores(tower, heads, scenes), scenes, strict=True)
        found[kind] = _mean([yes for one, scene in each for yes in _thing_answers(one, scene, head, patch)])
    return found


def icon_accuracy(tower: Tower, heads: Heads, painter: Painter, count: int) -> float:
    """Of icons alone, for the vendors of the painter."""
    scenes = [painter.scene(SEED, i, "icon") for i in range(count)]
    each = zip(class_scores(tower, heads, scenes), scenes, strict=True)
    return _mean([yes for one, scene in each for yes in _thing_answers(one, scene, "icon", tower.config.patch)])
