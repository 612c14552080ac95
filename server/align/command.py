"""`firstlight align`: is what this model computes here what a reference computes, and if not, where does it begin?

A process of its own. The reference is transformers, or a file that `--dump` wrote on a machine that has it.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from model_runtime.config import RuntimeConfig
from model_runtime.weights.errors import CheckpointError
from server.align.files import check_folders, write
from server.align.report import as_json, page, show
from server.config import add_arguments as add_options
from server.config import resolve
from server.models import resolve_model
from server.options import OptionError
from server.quality_command import TEXT

if TYPE_CHECKING:
    from model_runtime.align.reference import Reference
    from model_runtime.opening import Opened

EXIT_DIVERGES = 1
TRANSFORMERS = "transformers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command, and those of the runtime."""
    add_options(parser, ("runtime",))
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--reference",
        default=TRANSFORMERS,
        metavar="WHAT",
        help="transformers (default), or a file that --dump wrote",
    )
    group.add_argument(
        "--dump", type=Path, metavar="FILE", help="write the reference to this file, and do nothing else"
    )
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="what transformers computes in (default: float32)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    group.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page")


def run(arguments: argparse.Namespace) -> int:
    """Compare and print; EXIT_DIVERGES where the two differ by more than rounding. Raises OptionError, ModelNotFound,
    EmbeddedModelMissing and CheckpointError."""
    from model_runtime.align.compare import align
    from model_runtime.align.product import load_ranks, open_product
    from model_runtime.memory.budget import PlanError
    from model_runtime.opening import open_checkpoint

    config = resolve(arguments, os.environ)
    _check(arguments)
    model = resolve_model(config.model)
    try:
        if arguments.dump is not None:
            opened = open_checkpoint(model.path, config.runtime.image_folder)
            return _dump(_reference(opened, arguments, config.runtime), arguments.dump)
        checked = open_product(model.path, config.runtime)  # the reference may take minutes
        reference = _reference(checked.opened, arguments, config.runtime)
        ranks = load_ranks(checked, lambda fraction: None)
    except PlanError as error:
        raise OptionError(str(error)) from None
    found = align(ranks, reference)
    product = f"{ranks[0].computes}: {ranks[0].precisions.words}"
    computes = product + (f", {len(ranks)} ranks" if len(ranks) > 1 else "")
    title = f"{model.name} against {reference.made_by}"
    show(found, title, computes)
    if arguments.json is not None:
        write(arguments.json, json.dumps(as_json(found, title), indent=1))
    if arguments.html is not None:
        write(arguments.html, page(found, title, computes).html())
    return 0 if found.passed else EXIT_DIVERGES


def _check(arguments: argparse.Namespace) -> None:
    if arguments.dump is not None and arguments.reference != TRANSFORMERS:
        raise OptionError("--dump writes what transformers computes: leave --reference out")
    if arguments.dtype is not None and arguments.reference != TRANSFORMERS:
        raise OptionError("--dtype is what transformers computes in, and a file has been computed: leave --dtype out")
    check_folders((arguments.dump, arguments.json, arguments.html))


def _reference(opened: "Opened", arguments: argparse.Namespace, runtime: RuntimeConfig) -> "Reference":
    """Raises CheckpointError, PlanError."""
    from model_runtime.align.reference import load_reference
    from model_runtime.align.references import reference_of

    if arguments.reference == TRANSFORMERS:
        return reference_of(opened, arguments.dtype or "float32", runtime, _text(opened.path))
    return load_reference(Path(arguments.reference))


def _text(model: Path) -> Sequence[int]:
    """Tokens of a text, if the checkpoint has a tokenizer."""
    from server.prompt.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(model)
    except CheckpointError:
        return ()
    return tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False, allow_special=False)


def _dump(reference: "Reference", file: Path) -> int:
    try:
        reference.save(file)
    except OSError as error:
        raise OptionError(f"cannot write {file}: {error}") from None
    tokens = ", ".join(str(len(prompt)) for prompt in reference.prompts)
    print(f"{file}: {len(reference.places)} places of {reference.made_by}, prompts of {tokens} tokens")
    return 0
