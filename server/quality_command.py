"""`firstlight quality`: what quantisation costs a model, in numbers, on real text. A process of its own.

The model is run twice over the same text: in float32 throughout (weights as the file has them, activations and KV cache
in float32), then as the options ask for; the distributions of the next token are compared at every position. Both are
the product's own path: what is measured is what `serve` with the same options computes.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from model_runtime.config import RuntimeConfig
from scheduler.config import SchedulerConfig
from scheduler.plan import NO_STATE, SampleRows, ScoreRows, StateRuns, StepPlan, ints
from server.config import add_arguments as add_options
from server.config import resolve
from server.models import resolve_model
from server.options import OptionError
from server.quality import LOGITS, TOKENS, compare, lines

TEXT = Path(__file__).with_name("quality_text.txt")
"""Prose, dialogue, tables and code, written for this purpose: 2057 tokens of SmolLM2."""
EXIT_WORSE = 1

Window = list[int]
Told = Callable[[str, float], None]
"""Given (stage, fraction done)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command, and those of the runtime."""
    add_options(parser, ("runtime",))
    group = parser.add_argument_group("comparison")
    group.add_argument("--against", metavar="MODEL", help="compare with this model in float32 (default: the same)")
    group.add_argument("--text", type=Path, metavar="FILE", help="text to read (default: one of 2000 tokens)")
    group.add_argument("--window", type=int, default=512, metavar="N", help="tokens of a context (default: 512)")
    group.add_argument("--dump", type=Path, metavar="FOLDER", help="keep the reference's logits and the token ids")
    group.add_argument("--max-kl", type=float, metavar="X", help="exit with 1 if the mean KL divergence is larger")
    group.add_argument("--min-agreement", type=float, metavar="X", help="exit with 1 if less than this share agrees")
    group.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Compare and print; EXIT_WORSE where a limit that was given is exceeded. Raises OptionError, ModelNotFound,
    EmbeddedModelMissing, and CheckpointError for a model that cannot be read."""
    config = resolve(arguments, os.environ)
    model = resolve_model(config.model).path
    against = model if arguments.against is None else resolve_model(arguments.against).path
    if arguments.window < 2:
        raise OptionError("--window must be at least 2")
    windows = _windows(against, arguments.text or TEXT, arguments.window)
    with _shown() as told, _folder(arguments.dump) as folder:
        _write_reference(folder, _logits(against, in_float32(config.runtime), windows, "float32", told), windows)
        quality = compare(folder, _logits(model, config.runtime, windows, "as asked for", told))
    print(json.dumps(asdict(quality)) if arguments.json else "\n".join(lines(quality)))
    too_far = arguments.max_kl is not None and not quality.mean_kl <= arguments.max_kl
    too_few = arguments.min_agreement is not None and not quality.agreement >= arguments.min_agreement
    return EXIT_WORSE if too_far or too_few else 0


def in_float32(runtime: RuntimeConfig) -> RuntimeConfig:
    """The same without anything that rounds: weights as the file has them, everything else in float32; and without
    images, which no text needs."""
    return replace(runtime, mmproj="", quantization="none", activation_dtype="float32", kv_cache_dtype="float32")


def _windows(model: Path, text: Path, length: int) -> list[Window]:
    """The text's tokens, cut into contexts; a last one of a single token has nothing to predict."""
    from server.prompt.tokenizer import load_tokenizer

    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read {text}: {error}") from None
    ids = list(load_tokenizer(model).encode(content, add_special_tokens=False, allow_special=False))
    windows = [ids[start : start + length] for start in range(0, len(ids), length)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise OptionError(f"{text} is too short to predict anything")
    return windows


def _logits(
    model: Path, runtime: RuntimeConfig, windows: Sequence[Window], name: str, told: Told
) -> Iterator[NDArray[np.float32]]:
    """For each window [positions, V], of all its tokens but the last. Raises OptionError where the options ask for more
    than the machine or the model has, and CheckpointError."""
    from model_runtime.executor import load_runner
    from model_runtime.memory.budget import PlanError

    longest = max(map(len, windows))
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=longest)
    runtime = replace(runtime, max_model_len=longest, num_kv_blocks=-(-longest // scheduler.block_size))
    try:
        runner, info = load_runner(model, runtime, scheduler, lambda stage, done: told(f"{name}: {stage}", done))
    except PlanError as error:
        raise OptionError(str(error)) from None
    for index, window in enumerate(windows):
        told(f"{name}: computing", index / len(windows))
        yield runner.all_logits(_plan(window, info.block_size)).cpu().numpy()[:-1]


def _plan(window: Window, block_size: int) -> StepPlan:
    """One sequence, computed in one step."""
    return StepPlan(
        step_id=1,
        token_ids=ints(window),
        query_lens=ints([len(window)]),
        kv_lens=ints([len(window)]),
        block_tables=ints(list(range(-(-len(window) // block_size)))),
        sample=SampleRows(),
        score=ScoreRows(),
        states=StateRuns(ends=ints([len(window)]), reads=ints([NO_STATE]), writes=ints([0])),
    )


def _write_reference(folder: Path, logits: Iterator[NDArray[np.float32]], windows: list[Window]) -> None:
    """On disk, since for some models it is more than fits in memory beside them."""
    (folder / TOKENS).write_text(json.dumps(windows))
    total, start = sum(len(window) - 1 for window in windows), 0
    for part in logits:
        mode = "r+" if start else "w+"
        shape = None if start else (total, part.shape[1])
        kept = np.lib.format.open_memmap(folder / LOGITS, mode=mode, dtype=np.float32, shape=shape)
        kept[start : start + len(part)] = part
        start += len(part)


@contextmanager
def _folder(chosen: Path | None) -> Iterator[Path]:
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@contextmanager
def _shown() -> Iterator[Told]:
    """A progress bar on standard error where that is a terminal."""
    console = Console(stderr=True, emoji=False)
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda stage, done: progress.update(task, description=stage, completed=done)
