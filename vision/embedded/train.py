"""`python -m vision.embedded.train`: makes the eyes of the embedded model, stage by stage, and goes on where it was.

A tool, run by hand on CPU or GPU. `--folder` holds checkpoints and learning curves, `--cache` icons and fonts.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from server.embedded import embedded_path
from server.prompt.source import read_source
from vision.embedded.align import AlignConfig, AlignRun, Seer
from vision.embedded.encoder import EncoderConfig, EncoderRun, Painters, load_encoder
from vision.embedded.export import write_eyes, write_merged
from vision.embedded.gate import Gate
from vision.embedded.language import Language, read_weights
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


def train_encoder(options: argparse.Namespace, painters: Painters, wait: Callable[[], None]) -> None:
    """The first stage."""
    config = EncoderConfig(samples=options.samples)
    run = EncoderRun(options.folder, painters, config, TowerConfig(), torch.device(options.device))
    print(f"encoder: step {run.step} of {config.steps}", flush=True)
    run.run(wait)


def _aligned(options: argparse.Namespace, painters: Painters, weights: Mapping[str, Tensor]) -> AlignRun:
    """From the checkpoints as they are."""
    tower, heads = load_encoder(options.folder, TowerConfig())
    torch.manual_seed(AlignConfig().seed)
    language = Language(weights, torch.device(options.device))
    seer = Seer(tower, heads, language, read_source(embedded_path()).fast)
    return AlignRun(options.folder, painters.train, AlignConfig(scenes=options.scenes), seer)


def align(options: argparse.Namespace, painters: Painters, wait: Callable[[], None]) -> None:
    """The second stage."""
    gate = Gate(*load_encoder(options.folder, TowerConfig()), painters.evaluation, AlignConfig().measure_count)
    run = _aligned(options, painters, read_weights())
    print(f"alignment: step {run.step} of {run.config.steps}; the encoder alone: {gate.encoder}", flush=True)
    run.run(wait, gate.measure)


def export(options: argparse.Namespace, painters: Painters, wait: Callable[[], None]) -> None:
    """The last stage: `eyes` for the repository, and `merged`, which can be served as it is."""
    weights = read_weights()
    seer = _aligned(options, painters, weights).seer
    parts = seer.tower, seer.projector, seer.language.adapters, weights
    write_eyes(options.folder / "eyes", *parts)
    write_merged(options.folder / "merged", *parts, read_source(embedded_path()))
    print(f"written: {options.folder / 'eyes'} and {options.folder / 'merged'}", flush=True)


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
    painters = Painters(train=train, evaluation=evaluation, unseen=unseen)
    stages = {"encoder": train_encoder, "align": align, "export": export}
    for stage in options.stage or STAGES:
        stages[stage](options, painters, waiter(options.pause_while))


if __name__ == "__main__":
    main()
