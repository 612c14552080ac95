"""The command `firstlight`. Parses, then hands over to the module of the command that was asked for, which alone is
imported: most need much that the others do not.
"""

import argparse
import importlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from model_runtime.weights.errors import CheckpointError
from server.embedded import EmbeddedModelMissing
from server.models import ModelNotFound
from server.options import OptionError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141


class Command(NamedTuple):
    """One of the command line, and what its help says."""

    module: str
    """With `run(arguments)`, which gives the exit code."""
    flags: str
    """The module with `add_arguments(parser)`."""
    help: str
    description: str
    epilog: str = ""


COMMANDS: Mapping[str, Command] = {
    "serve": Command(
        "server.serve_command",
        "server.config",
        help="start the server",
        description="Start the server. With no MODEL it serves the embedded SmolLM2-135M-Instruct on 127.0.0.1:8000.",
        epilog="BYTES are a number or a size such as 512MiB or 4GB. Every option can also be a FIRSTLIGHT_* variable "
        "(FIRSTLIGHT_API_KEY) or a line of the YAML file. "
        "Example: firstlight serve ~/checkpoints/Qwen3-0.6B --port 9000 --max-model-len 4096",
    ),
    "chat": Command(
        "server.chat_command",
        "server.chat_command",
        help="talk to a running server, or start one",
        description="Talk to a server in the terminal. Without --url it starts one with MODEL and ends it afterwards.",
        epilog="example: firstlight chat --url http://127.0.0.1:8000 --system 'Answer in one sentence.'",
    ),
    "loadtest": Command(
        "loadtest.command",
        "loadtest.arguments",
        help="measure a running server",
        description="Load any server with OpenAI's API over HTTP and measure it: latency, throughput, goodput, errors.",
    ),
    "quality": Command(
        "server.quality_command",
        "server.quality_command",
        help="what quantisation costs a model",
        description="Compare a model as the options ask for with itself in float32, on real text: KL divergence, top-1 "
        "agreement, perplexity.",
        epilog="example: firstlight quality ~/checkpoints/Qwen3-0.6B --quantization int8 --min-agreement 0.98",
    ),
    "align": Command(
        "server.align.command",
        "server.align.command",
        help="compare a model with transformers, operation by operation",
        description="Give product and reference the same tokens and compare what they compute, layer by layer and "
        "operation by operation. Exit code 1 where they differ by more than rounding; the first place is named.",
        epilog="example: firstlight align ~/checkpoints/Qwen3-0.6B --html report.html",
    ),
    "ops": Command(
        "server.align.ops_command",
        "server.align.ops_command",
        help="measure the operations that a model calls on a device",
        description="Every operation that the model calls, by each implementation for the device: error against "
        "float64, time, bytes and products a second beside what the device reaches at most, and what falls back.",
        epilog="example: firstlight ops ~/checkpoints/Qwen3-0.6B --device xpu --json ops.json",
    ),
    "validate": Command(
        "server.validate.command",
        "server.validate.settings",
        help="check a model on this machine, end to end",
        description="Start a server with these options and check it: answers, preemption, speed, a soak. One HTML and "
        "one JSON report with a verdict; exit code 1 when a check failed. What passed is not run again.",
        epilog="example: firstlight validate ~/checkpoints/Qwen3-0.6B --max-model-len 4096 --soak-minutes 10",
    ),
    "plan": Command(
        "server.plan.command",
        "server.plan.command",
        help="what a model takes on given devices, and how to divide it",
        description="Plan memory and layout of a model from its configuration, without loading it: what a rank takes, "
        "which layouts and precisions fit, how fast they can be at most, and the command line of the best. Exit code 1 "
        "when nothing that serve accepts fits.",
        epilog="example: firstlight plan ~/checkpoints/Qwen3-8B --devices 2xH100 --context 32768 --concurrency 16",
    ),
    "doctor": Command(
        "server.doctor",
        "server.doctor",
        help="check this machine",
        description="Report Python, libraries, processor, memory, devices, compiler, kernels and the embedded model, "
        "and say what to do about what is missing. Exit code 1 when the server could not run.",
    ),
}


def _parser(asked: str) -> argparse.ArgumentParser:
    """With all commands, and the flags of the one that is asked for."""
    parser = argparse.ArgumentParser(
        prog="firstlight",
        description="Serve open language models over OpenAI-style REST and SSE.",
        epilog="Every option of serve can also be given as a FIRSTLIGHT_* variable or in a YAML file (--config).",
    )
    parser.add_argument("--version", action="version", version=f"firstlight {importlib.metadata.version('firstlight')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.help, description=command.description, epilog=command.epilog)
        if name == asked:
            importlib.import_module(command.flags).add_arguments(own)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the installed command."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser(next((word for word in given if not word.startswith("-")), "")).parse_args(given)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        code: int = importlib.import_module(COMMANDS[arguments.command].module).run(arguments)
    except (OptionError, ModelNotFound, EmbeddedModelMissing, CheckpointError) as error:
        print(f"firstlight: {error}", file=sys.stderr)
        code = EXIT_USAGE
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has left. What is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_NO_READER
    sys.exit(code)


if __name__ == "__main__":
    main()
