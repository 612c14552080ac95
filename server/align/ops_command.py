"""`firstlight ops`: every operation that a model calls, by each implementation for a device: error against float64,
time, and what it reaches of the device's own limits. A process of its own.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from server.align.files import check_folders, write
from server.config import add_arguments as add_options
from server.config import resolve
from server.models import resolve_model
from server.options import OptionError

if TYPE_CHECKING:
    from model_runtime.align.coverage import Measured
    from model_runtime.align.timing import Limits

HEAD = ("operation", "rows x width", "by", "error", "µs", "GB/s", "Gflop/s", "of limit")
WIDTH = 100
"""Of what is not a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command, and those of the runtime."""
    add_options(parser, ("runtime",))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Raises OptionError, ModelNotFound, EmbeddedModelMissing and CheckpointError."""
    from model_runtime.align.coverage import PROMPT, SEQUENCES, calls_of, measure
    from model_runtime.align.product import load_product
    from model_runtime.align.prompts import seeded_prompts
    from model_runtime.align.timing import limits
    from model_runtime.memory.budget import PlanError

    config = resolve(arguments, os.environ)
    if config.runtime.num_ranks > 1:
        raise OptionError("ops are measured on one rank: leave the parallel sizes out")
    if config.runtime.offload_weights:
        raise OptionError("ops are measured with weights on the device: leave offload_weights out")
    check_folders((arguments.json,))
    model = resolve_model(config.model)
    try:
        product = load_product(model.path, config.runtime, lambda fraction: None)
    except PlanError as error:
        raise OptionError(str(error)) from None
    lengths = [min(PROMPT // SEQUENCES, product.positions)] * SEQUENCES
    calls, plain = calls_of(model.path, product, seeded_prompts(lengths, product.decoder.config.vocab_size))
    most = limits(product.device, product.decoder.dtype)
    found = list(measure(product, plain, calls))
    if arguments.json is not None:
        document = {"model": model.name, "computes": product.computes, "limits": asdict(most)}
        text = json.dumps(document | {"operations": [asdict(entry) for entry in found]}, indent=1)
        write(arguments.json, text)
    show(f"{model.name}, {product.computes}: {product.precisions.words}", found, most)
    return 0


def show(title: str, found: "Sequence[Measured]", most: "Limits") -> None:
    """A table, and what falls back."""
    console = Console(emoji=False, highlight=False)
    if not console.is_terminal:
        console = Console(emoji=False, highlight=False, width=WIDTH)
    console.print(title, markup=False)
    console.print(
        f"measured on this device: {most.read_bytes / 1e9:.1f} GB/s from memory, {most.flops / 1e9:.0f} Gflop/s in "
        "large products; what is in a cache is read faster"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(HEAD):
        table.add_column(name, no_wrap=True, justify="left" if place < 3 else "right")
    for entry in found:
        table.add_row(*_row(entry, most), style=None if entry.is_used else "dim")
    console.print(table)
    fallen = sorted({entry.operation for entry in found if entry.falls_back})
    if fallen:
        console.print(f"computed by the reference, for want of one for the device: {', '.join(fallen)}", markup=False)
    else:
        console.print("nothing falls back to the reference")


def _row(entry: "Measured", most: "Limits") -> tuple[str, ...]:
    reached = entry.bytes_moved / entry.seconds / most.read_bytes, entry.flops / entry.seconds / most.flops
    return (
        entry.operation,
        entry.shape,
        entry.implementation,
        f"{entry.error:.1e}",
        f"{entry.seconds * 1e6:.0f}",
        f"{entry.bytes_moved / entry.seconds / 1e9:.2f}",
        f"{entry.flops / entry.seconds / 1e9:.1f}" if entry.flops else "",
        f"{max(reached):.0%}",
    )
