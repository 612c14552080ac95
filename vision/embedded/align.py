"""The join: frozen tower, projector that starts from words, adapters of the language model; trained on questions.

Run by `vision.embedded.train` after the encoder. `right_answers` is the gate: whole answers, against the encoder's own.
Shapes: T tokens, P patches, H the language model's width.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim import AdamW

from vision.embedded import store
from vision.embedded.encoder import training_scene
from vision.embedded.heads import Heads
from vision.embedded.language import Language
from vision.embedded.painter import Painter
from vision.embedded.projector import Projector, start_from_words
from vision.embedded.questions import questions
from vision.embedded.scene import Scene
from vision.embedded.schedule import share_of_rate
from vision.embedded.tower import Tower
from vision.embedded.turns import IMAGE_TOKEN, Turns, batch, encode, question_first, turns

CHECKPOINT = "align.safetensors"
CURVE = "align.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignConfig:
    """How long and how fast."""

    scenes: int = 14_000
    batch: int = 8
    seed: int = 2
    question_first: float = 0.25
    """Share of the scenes with one question before the picture: in conversations there may be text before it."""
    questions: int = 6
    """At most, of a scene; several shapes have up to twenty, beside which others would be padding."""
    projector_rate: float = 3e-4
    adapter_rate: float = 1e-3
    warmup_steps: int = 20
    cooldown: float = 0.3
    checkpoint_every_s: float = 180.0
    measure_every: int = 1_600
    """Scenes."""
    measure_count: int = 20

    @property
    def steps(self) -> int:
        """In all."""
        return self.scenes // self.batch


class Seer(torch.nn.Module):
    """Projector and language model."""

    def __init__(
        self, tower: Tower, heads: Heads, present: Mapping[str, float], language: Language, tokenizer: Tokenizer
    ) -> None:
        """`present` as for the projector; `language` says by where it is on which device all of this runs."""
        super().__init__()
        self.language, self.tokenizer = language, tokenizer
        first = language.embed(torch.tensor([0]))
        self.device = first.device
        self.tower = tower.to(self.device)
        self.projector = Projector(tower.config.width, first.shape[-1]).to(self.device)
        start_from_words(self.projector, heads.to(self.device), present, self._embedding)

    def _embedding(self, text: str) -> Tensor:
        return self.language.embed(torch.tensor(encode(self.tokenizer, text))).mean(dim=0)

    @torch.no_grad()
    def features(self, scenes: Sequence[Scene]) -> Tensor:
        """[B, P, W] of the frozen tower."""
        pixels = torch.from_numpy(np.stack([scene.pixels for scene in scenes]))
        found: Tensor = self.tower(pixels.to(self.device))
        return found

    def answers(self, asked: Sequence[Turns], features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [N, vocabulary] and the ids that are wanted [N], for all tokens of answers; and where they are [N, 2]:
        the picture and the branch."""
        ids, positions, wanted, mask = (part.to(self.device) for part in batch(asked))
        x = self.language.embed(ids).masked_scatter((ids == IMAGE_TOKEN)[..., None], self.projector(features))
        hidden = self.language(x, positions, mask)
        places = (wanted >= 0).nonzero()
        branches = torch.tensor([int(asked[row].branch[column]) for row, column in places.tolist()], device=self.device)
        chosen = places[:, 0], places[:, 1]
        return self.language.logits(hidden[chosen]), wanted[chosen], torch.stack((places[:, 0], branches), dim=1)


def scene_turns(
    tokenizer: Tokenizer, scene: Scene, seed: int, index: int, patches: int, share_first: float = 0.0, most: int = 99
) -> tuple[Turns, list[str]]:
    """`most` questions of a scene, and their tasks; or, of a share of the scenes, one question before the picture."""
    random = np.random.default_rng((seed, index, 2))
    asked = questions(random, scene)
    if len(asked) > most:
        asked = [asked[int(i)] for i in sorted(random.choice(len(asked), most, replace=False))]
    if random.random() < share_first:
        one = asked[int(random.integers(len(asked)))]
        return question_first(tokenizer, one, patches), [one.task]
    return turns(tokenizer, asked, patches), [question.task for question in asked]


@torch.no_grad()
def right_answers(
    seer: Seer, scenes: Sequence[Scene], features: Tensor, seed: int, size: int = 8
) -> dict[str, tuple[float, int]]:
    """By task: the share of answers that greedy decoding gives whole and exactly, and how many were asked.

    With the right answer as input, all its tokens are the likeliest exactly if greedy decoding would have said it.
    """
    right: dict[str, list[bool]] = {}
    for start in range(0, len(scenes), size):
        part = [
            scene_turns(seer.tokenizer, scene, seed, start + i, features.shape[1])
            for i, scene in enumerate(scenes[start : start + size])
        ]
        logits, wanted, places = seer.answers([one for one, _ in part], features[start : start + size])
        said = logits.argmax(dim=-1) == wanted
        for row, (_, tasks) in enumerate(part):
            for number, task in enumerate(tasks, 1):
                there = (places[:, 0] == row) & (places[:, 1] == number)
                right.setdefault(task, []).append(bool(said[there].all()))
    return {task: (round(sum(each) / len(each), 3), len(each)) for task, each in sorted(right.items())}


class AlignRun:
    """Trains projector and adapters; goes on from the checkpoint of its folder."""

    def __init__(self, folder: Path, painter: Painter, config: AlignConfig, seer: Seer) -> None:
        self.folder, self.painter, self.config, self.seer = folder, painter, config, seer
        self.step = self.pairs = 0
        self.trained = torch.nn.ModuleDict({"projector": seer.projector, "adapters": seer.language.adapters})
        self.optimizer = AdamW(
            [
                {"params": list(seer.projector.parameters()), "lr": config.projector_rate},
                {"params": list(seer.language.adapters.parameters()), "lr": config.adapter_rate},
            ],
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / CHECKPOINT).is_file():
            parts, progress = store.load(folder / CHECKPOINT)
            self.step, self.pairs = progress["step"], progress["pairs"]
            self.trained.load_state_dict(parts["model"])
            store.fill_optimizers([self.optimizer], parts["optimizer"])

    def save(self) -> None:
        """Everything to go on with."""
        parts = {"model": self.trained.state_dict(), "optimizer": store.optimizer_tensors([self.optimizer])}
        store.save(self.folder / CHECKPOINT, parts, {"step": self.step, "pairs": self.pairs})

    def train_step(self) -> float:
        """One batch of pictures with all their questions; the loss of a token."""
        config, first = self.config, self.step * self.config.batch
        scenes = [training_scene(self.painter, config.seed, first + i) for i in range(config.batch)]
        features = self.seer.features(scenes)
        asked = [
            scene_turns(
                *(self.seer.tokenizer, scene, config.seed, first + i, features.shape[1]),
                share_first=config.question_first,
                most=config.questions,
            )
            for i, scene in enumerate(scenes)
        ]
        logits, wanted, _ = self.seer.answers([one for one, _ in asked], features)
        loss = F.cross_entropy(logits, wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.trained.parameters(), 1.0)
        share = share_of_rate(self.step, config.steps, config.warmup_steps, config.cooldown)
        for group, full in zip(self.optimizer.param_groups, (config.projector_rate, config.adapter_rate), strict=True):
            group["lr"] = full * share
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.pairs += sum(len(tasks) for _, tasks in asked)
        return float(loss.detach())

    def run(self, wait: Callable[[], None], measure: Callable[[Seer, bool], dict[str, object]]) -> None:
        """To the end. `measure` is told whether it is the last time."""
        saved, shown = time.monotonic(), []
        while self.step < self.config.steps:
            wait()
            shown.append(self.train_step())
            done = self.step * self.config.batch
            is_last = self.step == self.config.steps
            if done // self.config.measure_every != (done - self.config.batch) // self.config.measure_every or is_last:
                loss, shown = round(sum(shown) / len(shown), 4), []
                self._note({"scenes": done, "pairs": self.pairs, "loss": loss, **measure(self.seer, is_last)})
            if time.monotonic() - saved > self.config.checkpoint_every_s or is_last:
                self.save()
                saved = time.monotonic()

    def _note(self, line: dict[str, object]) -> None:
        text = json.dumps(line)
        with (self.folder / CURVE).open("a") as file:
            file.write(text + "\n")
        print(text, flush=True)
