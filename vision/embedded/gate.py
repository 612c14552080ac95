"""Whether the join loses anything: the language model's whole answers beside what the encoder alone would have said.

Called by the alignment while it trains. In the control every question is about the next
picture, mostly one of the same kind, so that all that is left is to guess.
"""

import torch

from vision.embedded.align import Seer, right_answers
from vision.embedded.heads import Heads
from vision.embedded.measure import SEED, class_scores, single_answer
from vision.embedded.painter import Painter
from vision.embedded.scene import Scene
from vision.embedded.tower import Tower

KINDS = ("shapes", "icon", "digits", "word", "chart")


class Gate:
    """Pictures of the evaluation's split, the same at every measure."""

    def __init__(self, tower: Tower, heads: Heads, painter: Painter, count: int) -> None:
        """`count` pictures of a kind; `encoder` holds the encoder's own shares of right answers."""
        self.scenes = [
            painter.scene(SEED, i, kind) for kind in KINDS for i in range(2 * count if kind == "shapes" else count)
        ]
        self.encoder = self._alone(tower, heads)

    def _alone(self, tower: Tower, heads: Heads) -> dict[str, float]:
        scores = class_scores(tower, heads, self.scenes)
        right: dict[str, list[bool]] = {}
        for scene, one in zip(self.scenes, scores, strict=True):
            for task, yes in _answers(scene, one).items():
                right.setdefault(task, []).append(yes)
        return {task: round(sum(each) / len(each), 3) for task, each in right.items()}

    def measure(self, seer: Seer, with_control: bool) -> dict[str, object]:
        """Shares of right answers by task; the control takes as long again."""
        features = seer.features(self.scenes)
        found: dict[str, object] = {"right": right_answers(seer, self.scenes, features, SEED)}
        if with_control:
            found["control"] = right_answers(seer, self.scenes, features.roll(1, dims=0), SEED)
        return found


def _answers(scene: Scene, scores: dict[str, torch.Tensor]) -> dict[str, bool]:
    """For the tasks that the encoder can answer without being told where to look."""
    if scene.kind == "shapes":
        found = {"count": int(scores["count"].sum(dim=0).argmax()) + 1 == len(scene.things)}
        if len(scene.things) == 1:
            for head in ("colour", "shape"):
                found[head] = single_answer(scores, head, "shape") == scene.things[0].of_head(head)
        return found
    if scene.kind == "icon" and len(scene.things) == 1:
        return {"icon": single_answer(scores, "icon", "icon") == scene.things[0].icon}
    if scene.kind == "chart":
        return {"bars": int(scores["count"].sum(dim=0).argmax()) + 1 == len(scene.things)}
    return {}
