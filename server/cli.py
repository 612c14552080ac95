"""The command `firstlight`. Parses, then hands over to a module of its own."""

import argparse
import importlib.metadata
import logging
import os
import sys
from collections.abc import Sequence

from loadtest.arguments import add_arguments as add_loadtest_arguments
from model_runtime.weights.errors import CheckpointError
from server import chat_command, doctor, quality_command, serve_command
from server.align import command as align_command
from server.align import ops_command
from server.config import add_arguments, resolve
from server.embedded import EmbeddedModelMissing
from server.models import ModelNotFound
from server.options import OptionError
from server.plan import command as plan_command
from server.torchrun import torchrun_variables
from server.validate import settings as validate_settings

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="firstlight",
        description="Serve open language models over OpenAI-style REST and SSE.",
        epilog="Every option of serve can also be given as a FIRSTLIGHT_* variable or in a YAML file (--config).",
    )
    parser.add_argument("--version", action="version", version=f"firstlight {importlib.metadata.version('firstlight')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="start the server",
        description="Start the server. With no MODEL it serves the embedded SmolLM2-135M-Instruct on 127.0.0.1:8000.",
        epilog="example: firstlight serve ~/checkpoints/Qwen3-0.6B --port 9000 --max-model-len 4096",
    )
    add_arguments(serve)
    chat = commands.add_parser(
        "chat",
        help="talk to a running server, or start one",
        description="Talk to a server in the terminal. Without --url it starts one with MODEL and ends it afterwards.",
        epilog="example: firstlight chat --url http://127.0.0.1:8000 --system 'Answer in one sentence.'",
    )
    chat_command.add_arguments(chat)
    load = commands.add_parser(
        "loadtest",
        help="measure a running server",
        description="Load any server with OpenAI's API over HTTP and measure it: latency, throughput, goodput, errors.",
    )
    add_loadtest_arguments(load)
    _add_checks(commands)
    return parser


def _add_checks(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Commands that look at a model or the machine, and serve nothing."""
    quality = commands.add_parser(
        "quality",
        help="what quantisation costs a model",
        description="Compare a model as the options ask for with itself in float32, on real text: KL divergence, top-1 "
        "agreement, perplexity.",
        epilog="example: firstlight quality ~/checkpoints/Qwen3-0.6B --quantization int8 --min-agreement 0.98",
    )
    quality_command.add_arguments(quality)
    alignment = commands.add_parser(
        "align",
        help="compare a model with transformers, operation by operation",
        description="Give product and reference the same tokens and compare what they compute, layer by layer and "
        "operation by operation. Exit code 1 where they differ by more than rounding; the first place is named.",
        epilog="example: firstlight align ~/checkpoints/Qwen3-0.6B --html report.html",
    )
    align_command.add_arguments(alignment)
    coverage = commands.add_parser(
        "ops",
        help="measure the operations that a model calls on a device",
        description="Every operation that the model calls, by each implementation for the device: error against "
        "float64, time, bytes and products a second beside what the device reaches at most, and what falls back.",
        epilog="example: firstlight ops ~/checkpoints/Qwen3-0.6B --device xpu --json ops.json",
    )
    ops_command.add_arguments(coverage)
    gate = commands.add_parser(
        "validate",
        help="check a model on this machine, end to end",
        description="Start a server with these options and check it: answers, preemption, speed, a soak. One HTML and "
        "one JSON report with a verdict; exit code 1 when a check failed. What passed is not run again.",
        epilog="example: firstlight validate ~/checkpoints/Qwen3-0.6B --max-model-len 4096 --soak-minutes 10",
    )
    validate_settings.add_flags(gate)
    plan = commands.add_parser(
        "plan",
        help="what a model takes on given devices, and how to divide it",
        description="Plan memory and layout of a model from its configuration, without loading it: what a rank takes, "
        "which layouts and precisions fit, how fast they can be at most, and the command line of the best. Exit code 1 "
        "when nothing that serve accepts fits.",
        epilog="example: firstlight plan ~/checkpoints/Qwen3-8B --devices 2xH100 --context 32768 --concurrency 16",
    )
    plan_command.add_arguments(plan)
    check = commands.add_parser(
        "doctor",
        help="check this machine",
        description="Report Python, libraries, processor, memory, devices, compiler, kernels and the embedded model, "
        "and say what to do about what is missing. Exit code 1 when the server could not run.",
    )
    doctor.add_arguments(check)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the installed command."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        if arguments.command == "serve":
            code = serve_command.run(resolve(arguments, torchrun_variables(os.environ) | dict(os.environ)))
        elif arguments.command == "chat":
            code = chat_command.run(arguments)
        elif arguments.command == "loadtest":
            # What it needs to measure and draw is of no use to the other commands.
            from loadtest import command

            code = command.run(arguments)
        elif arguments.command == "quality":
            code = quality_command.run(arguments)
        elif arguments.command == "plan":
            code = plan_command.run(arguments)
        elif arguments.command == "align":
            code = align_command.run(arguments)
        elif arguments.command == "ops":
            code = ops_command.run(arguments)
        elif arguments.command == "validate":
            from server.validate import command as validate_command

            code = validate_command.run(arguments)
        else:
            code = doctor.run(arguments)
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
