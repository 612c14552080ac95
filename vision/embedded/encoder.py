"""The training of the tower: pictures without end, heads for everything that is known about them.

Run by `vision.embedded.train`, in its process; goes on from the last checkpoint of its folder. The same seed gives the
same pictures whether it was interrupted or not.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from vision.embedded import store
from vision.embedded.heads import Heads, losses, total
from vision.embedded.measure import accuracies, icon_accuracy
from vision.embedded.painter import Painter
from vision.embedded.scene import Scene
from vision.embedded.schedule import share_of_rate
from vision.embedded.targets import targets
from vision.embedded.tower import Tower, TowerConfig, start
from vision.embedded.vocabulary import SCENES

MIX = (0.34, 0.27, 0.09, 0.24, 0.06)
"""Shares of the kinds of scenes, in the vocabulary's order. Constant: what is left out for a while is forgotten."""
CHECKPOINT = "encoder.safetensors"
CURVE = "encoder.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """How long and how fast."""

    samples: int = 320_000
    batch: int = 64
    seed: int = 1
    first_pictures: int = 512
    """From which the principal components are taken."""
    muon_rate: float = 2e-3
    adam_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup_steps: int = 100
    cooldown: float = 0.25
    """The last share of the steps, in which the rate falls to zero."""
    average: float = 0.998
    checkpoint_every_s: float = 180.0
    measure_every: int = 32_768
    """Samples."""
    measure_count: int = 250

    @property
    def steps(self) -> int:
        """In all."""
        return self.samples // self.batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Painters:
    """For training, for its measure, and with the icons that are never trained on."""

    train: Painter
    evaluation: Painter
    unseen: Painter


def training_scene(painter: Painter, seed: int, index: int) -> Scene:
    """Sample `index` of the stream of a seed."""
    kind = np.random.default_rng((seed, index, 1)).choice(len(SCENES), p=MIX)
    return painter.scene(seed, index, SCENES[int(kind)])


class EncoderRun:
    """Tower, heads, optimizers and how far they are."""

    def __init__(
        self, folder: Path, painters: Painters, config: EncoderConfig, tower: TowerConfig, device: torch.device
    ) -> None:
        self.folder, self.painters, self.config, self.device = folder, painters, config, device
        self.step = 0
        torch.manual_seed(config.seed)
        self.tower, self.heads = Tower(tower), Heads(tower.width)
        folder.mkdir(parents=True, exist_ok=True)
        resumed = (folder / CHECKPOINT).is_file()
        if not resumed:
            start(
                self.tower,
                _pixels([training_scene(painters.train, config.seed, i) for i in range(config.first_pictures)]),
            )
        self.model = torch.nn.ModuleDict({"tower": self.tower, "heads": self.heads}).to(device)
        self.average = store.Average(self.model, config.average)
        self.optimizers = self._optimizers()
        if resumed:
            self._resume()

    def _optimizers(self) -> list[Optimizer]:
        """Muon for the matrices of the layers, Adam for what is at the ends."""
        matrices = [p for p in self.tower.encoder.parameters() if p.dim() == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        config = self.config
        return [
            Muon(matrices, lr=config.muon_rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"),
            AdamW(others, lr=config.adam_rate, betas=(0.9, 0.98), weight_decay=0.01),
        ]

    def save(self) -> None:
        """Everything that `_resume` needs."""
        parts = {
            "model": self.model.state_dict(),
            "average": self.average.tensors,
            "optimizer": store.optimizer_tensors(self.optimizers),
        }
        store.save(self.folder / CHECKPOINT, parts, {"step": self.step})

    def _resume(self) -> None:
        parts, progress = store.load(self.folder / CHECKPOINT)
        self.step = progress["step"]
        self.model.load_state_dict(parts["model"])
        self.average.tensors = {name: value.to(self.device) for name, value in parts["average"].items()}
        store.fill_optimizers(self.optimizers, parts["optimizer"])

    def train_step(self) -> dict[str, float]:
        """One batch; the losses of the heads."""
        config = self.config
        first = self.step * config.batch
        scenes = [training_scene(self.painters.train, config.seed, first + i) for i in range(config.batch)]
        with torch.autocast(self.device.type, torch.bfloat16):
            logits, mask = self.heads(self.tower(_pixels(scenes).to(self.device)))
        parts = losses(logits, mask, targets(scenes, self.tower.config.patch))
        total(parts).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        share = share_of_rate(self.step, config.steps, config.warmup_steps, config.cooldown)
        for optimizer, full in zip(self.optimizers, (config.muon_rate, config.adam_rate), strict=True):
            optimizer.param_groups[0]["lr"] = full * share
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.average.update(self.model, self.step)
        return {name: round(float(value.detach()), 4) for name, value in parts.items()}

    def measure(self) -> dict[str, float]:
        """What the averaged weights tell apart."""
        tower, heads = averaged(self.average.tensors, self.tower.config)
        found = accuracies(tower, heads, self.painters.evaluation, self.config.measure_count)
        found["icon of an unseen vendor"] = icon_accuracy(tower, heads, self.painters.unseen, self.config.measure_count)
        return found

    def run(self, wait: Callable[[], None]) -> None:
        """To the end; `wait` is called before every step."""
        saved, began, busy = time.monotonic(), self.step, time.process_time()
        while self.step < self.config.steps:
            wait()
            parts = self.train_step()
            done = self.step * self.config.batch
            is_last = self.step == self.config.steps
            if done // self.config.measure_every != (done - self.config.batch) // self.config.measure_every or is_last:
                rate = (self.step - began) * self.config.batch / (time.process_time() - busy)
                self._note({"samples": done, "per cpu second": round(rate, 1), "loss": parts, "right": self.measure()})
            if time.monotonic() - saved > self.config.checkpoint_every_s or is_last:
                self.save()
                saved = time.monotonic()

    def _note(self, line: dict[str, object]) -> None:
        text = json.dumps(line)
        with (self.folder / CURVE).open("a") as file:
            file.write(text + "\n")
        print(text, flush=True)


def averaged(tensors: dict[str, Tensor], config: TowerConfig) -> tuple[Tower, Heads]:
    """Tower and heads with the averaged weights, on CPU."""
    tower, heads = Tower(config), Heads(config.width)
    model = torch.nn.ModuleDict({"tower": tower, "heads": heads})
    model.load_state_dict({name: value.cpu() for name, value in tensors.items()})
    return tower.eval(), heads.eval()


def load_encoder(folder: Path, config: TowerConfig) -> tuple[Tower, Heads]:
    """The averaged weights of the folder's checkpoint."""
    parts, _ = store.load(folder / CHECKPOINT)
    return averaged(parts["average"], config)


def _pixels(scenes: list[Scene]) -> Tensor:
    return torch.from_numpy(np.stack([scene.pixels for scene in scenes]))
