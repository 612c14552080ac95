"""`python -m vision.embedded.train`: makes the eyes of the embedded model, stage by stage, and goes on where it was.

A tool, run by hand on CPU or GPU. `--folder` holds checkpoints and learning curves, `--cache` icons and fonts.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from server.embedded import embedded_path
from server.prompt.source import read_source
from vision.embedded.align import AlignConfig, AlignRun, Seer
from vision.embedded.encoder import EncoderConfig, EncoderRun, Painters, load_encoder, training_scene
from vision.embedded.export import write_eyes, write_merged
from vision.embedded.gate import Gate
from vision.embedded.language import Language, read_weights
from vision.embedded.measure import present_logits
from vision.embedded.painter import EVALUATION, TRAIN, UNSEEN_VENDOR, load_painter
from vision.embedded.sources import SourceError
from vision.embedded.tower import TowerConfig

PAUSE_S = 1.0
STAGES = ("encoder", "align", "export")


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(prog="python -m vision.embedded.train", description=__doc__)
    found.add_argument("--folder", type=Path, required=True, help="checkpoints and learning curves")
    found.add_argument("--cache", type=Path, required=True, help="icons and fonts, fetched with npm at the first run")
    found.add_argument("--stage", choices=STAGES, action="append", help="one of them only; all in turn if not given")
    found.add_argument("--samples", type=int, default=EncoderConfig().samples, help="pictures for the encoder")
    found.add_argument("--scenes", type=int, default=AlignConfig().scenes, help="pictures for the language model")
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--threads", type=int, default=0, help="of the processor; 0: all")
    found.add_argument(
        "--compile", action="store_true", help="loops by torch.compile: up to twice as fast, needs a C++ compiler"
    )
    found.add_argument(
        "--pause-while",
        type=Path,
        action="append",
        default=[],
        help="wait as long as this file exists; may be repeated",
    )
    return found


def waiter(paths: Sequence[Path]) -> Callable[[], None]:
    """Returns at once when none of the files exists, else when they are gone."""

    def wait() -> None:
        while any(path.exists() for path in paths):
            time.sleep(PAUSE_S)

    return wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """All stages over one folder."""

    folder: Path
    painters: Painters
    language: Callable[[], Mapping[str, Tensor]]
    """The weights of the language model."""
    tower: TowerConfig = field(default_factory=TowerConfig)
    encoder: EncoderConfig
    align: AlignConfig
    device: torch.device
    wait: Callable[[], None]
    """Called before every step."""
    compiled: bool = False
    """Whether torch.compile makes the loops of tower and language model."""

    def run(self, stage: str) -> None:
        """One of STAGES."""
        {"encoder": self._encode, "align": self._align, "export": self._export}[stage]()

    def _encode(self) -> None:
        run = EncoderRun(self.folder, self.painters, self.encoder, self.tower, self.device)
        print(f"encoder: step {run.step} of {self.encoder.steps}", flush=True)
        if self.compiled:
            run.tower.compile(dynamic=False)
        run.run(self.wait)

    def _joined(self, weights: Mapping[str, Tensor]) -> AlignRun:
        """From the checkpoints as they are."""
        tower, heads = load_encoder(self.folder, self.tower)
        scenes = [training_scene(self.painters.train, self.align.seed, i) for i in range(self.encoder.first_pictures)]
        present = present_logits(tower, heads, scenes)
        torch.manual_seed(self.align.seed)
        seer = Seer(tower, heads, present, Language(weights, self.device), read_source(embedded_path()).fast)
        return AlignRun(self.folder, self.painters.train, self.align, seer)

    def _align(self) -> None:
        gate = Gate(*load_encoder(self.folder, self.tower), self.painters.evaluation, self.align.measure_count)
        run = self._joined(self.language())
        if self.compiled:
            run.seer.language.compile_layers()
        print(f"alignment: step {run.step} of {self.align.steps}; the encoder alone: {gate.encoder}", flush=True)
        run.run(self.wait, gate.measure)

    def _export(self) -> None:
        weights = self.language()
        seer = self._joined(weights).seer
        parts = seer.tower, seer.projector, seer.language.adapters, weights
        write_eyes(self.folder / "eyes", *parts)
        write_merged(self.folder / "merged", *parts, read_source(embedded_path()))
        print(f"written: {self.folder / 'eyes'} and {self.folder / 'merged'}", flush=True)


def main() -> None:
    """Trains what is asked for."""
    arguments = parser()
    options = arguments.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        train, evaluation, unseen = (load_painter(split, options.cache) for split in (TRAIN, EVALUATION, UNSEEN_VENDOR))
    except SourceError as error:
        arguments.error(str(error))
    pipeline = Pipeline(
        folder=options.folder,
        painters=Painters(train=train, evaluation=evaluation, unseen=unseen),
        language=read_weights,
        encoder=EncoderConfig(samples=options.samples),
        align=AlignConfig(scenes=options.scenes),
        device=torch.device(options.device),
        wait=waiter(options.pause_while),
        compiled=options.compile,
    )
    for stage in options.stage or STAGES:
        pipeline.run(stage)


if __name__ == "__main__":
    main()
