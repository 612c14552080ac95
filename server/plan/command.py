"""`firstlight plan`: what a model takes on given devices, how it can be divided, and how to serve it. A process of its
own; nothing is loaded.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from model_runtime.config import ActivationDtype, KVCacheDtype, Quantization, RuntimeConfig
from scheduler.config import SchedulerConfig
from server.config import EMBEDDED
from server.embedded import embedded_mmproj
from server.models import resolve_model
from server.options import OptionError, parse_bytes
from server.plan.devices import CARDS, GRAMMAR, Devices, Speed, parse_devices, parse_rate

if TYPE_CHECKING:
    from model_runtime.opening import Opened
    from server.plan.candidates import Asked

EXIT_DOES_NOT_FIT = 1
Value = TypeVar("Value")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    text = "checkpoint folder, config.json, GGUF file or 'embedded' (default)"
    parser.add_argument("model", nargs="?", default=EMBEDDED, metavar="MODEL", help=text)
    parser.add_argument("--devices", default="cpu", metavar="DEVICES", help=GRAMMAR.format(", ".join(CARDS)))
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines, each with such devices")
    parser.add_argument("--link", metavar="RATE", help="from a device to another one; with --nodes between machines")
    parser.add_argument("--host-link", metavar="RATE", help="from the host's memory to a device, for --offload-weights")
    parser.add_argument("--bandwidth", metavar="RATE", help="of a device's memory, on CPU a machine's: 3.35TB/s")
    parser.add_argument("--flops", metavar="RATE", help="the same of its products of matrices, such as 989TFLOP/s")
    parser.add_argument("--context", type=int, default=0, metavar="N", help="longest sequence (default: the model's)")
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="sequences at once (default: 1)")
    parser.add_argument("--mmproj", default=None, metavar="FOLDER", help="image side for a MODEL of text")
    group = parser.add_argument_group("what serve is told; without the first two every kind is planned")
    group.add_argument("--quantization", choices=get_args(Quantization))
    group.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDtype))
    group.add_argument(
        "--activation-dtype", choices=get_args(ActivationDtype), default=RuntimeConfig().activation_dtype
    )
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens of a step")
    group.add_argument("--memory-budget", metavar="BYTES", help="of a machine's ranks together, as serve takes it")
    group.add_argument("--offload-weights", metavar="BYTES", help="of layers that each rank leaves in host memory")
    group.add_argument("--encoder-cache-bytes", metavar="BYTES", help="of encoded images")
    parser.add_argument("--all", action="store_true", help="show every layout in every precision")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Plan and print; EXIT_DOES_NOT_FIT where nothing that serve accepts does. Raises OptionError, ModelNotFound,
    EmbeddedModelMissing and CheckpointError."""
    devices = _devices(arguments)
    from model_runtime.memory.planning import Outline
    from server.plan.candidates import candidates
    from server.plan.choice import recommended
    from server.plan.show import as_json, as_text

    opened = open_model(arguments.model, arguments.mmproj)
    asked = _asked(arguments, opened.config.max_position)
    model = Outline(opened)
    found = candidates(model, devices, asked)
    if arguments.json:
        print(json.dumps(as_json(arguments.model, model, devices, asked, found), indent=2))
    else:
        print(as_text(arguments.model, model, devices, asked, found, show_all=arguments.all))
    return 0 if recommended(found, devices, asked) is not None else EXIT_DOES_NOT_FIT


def open_model(name: str, mmproj: str | None = None) -> "Opened":
    """A MODEL of serve, with its --mmproj, or a configuration without weights: a config.json, or a folder that has
    nothing else."""
    from model_runtime.opening import open_checkpoint, open_configuration

    path = Path(name).expanduser()
    is_configuration = path.is_file() and path.suffix == ".json"
    if not is_configuration:
        path = resolve_model(name).path
        if path.is_dir() and not any(path.glob("*.safetensors*")):
            is_configuration, path = True, path / "config.json"
    if is_configuration:
        if mmproj:
            raise OptionError("--mmproj is for a model with weights, and there is a configuration alone")
        return open_configuration(path)
    if mmproj is None and name == EMBEDDED:
        mmproj = embedded_mmproj()
    return open_checkpoint(path, RuntimeConfig(mmproj=mmproj or "").image_folder)


def _devices(arguments: argparse.Namespace) -> Devices:
    if arguments.nodes < 1:
        raise OptionError("--nodes must be at least 1")
    bandwidth, flops = _rate(arguments.bandwidth, "--bandwidth", "B/s"), _rate(arguments.flops, "--flops", "FLOP/s")
    link = _rate(arguments.link, "--link", "B/s")
    host_link = _rate(arguments.host_link, "--host-link", "B/s")
    given = Speed(bandwidth=bandwidth, flops=flops, link=link if arguments.nodes == 1 else None, host_link=host_link)
    return parse_devices(arguments.devices, arguments.nodes, given, link)


def _rate(text: str | None, flag: str, unit: Literal["B/s", "FLOP/s"]) -> float | None:
    return None if text is None else _parsed(text, flag, lambda given: parse_rate(given, unit))


def _bytes(text: str | None, flag: str, default: int) -> int:
    return default if text is None else _parsed(text, flag, parse_bytes)


def _parsed(text: str, flag: str, parse: Callable[[str], Value]) -> Value:
    try:
        return parse(text)
    except ValueError as error:
        raise OptionError(f"{flag}: {error}") from None


def _asked(arguments: argparse.Namespace, max_position: int) -> "Asked":
    from server.plan.candidates import PRECISIONS, Asked

    if arguments.context and not 2 <= arguments.context <= max_position:
        raise OptionError(f"--context must be from 2 to the {max_position} positions of the model")
    if arguments.concurrency < 1:
        raise OptionError("--concurrency must be at least 1")
    usual = RuntimeConfig()
    runtime = RuntimeConfig(
        max_model_len=arguments.context or max_position,
        activation_dtype=arguments.activation_dtype,
        memory_budget=_bytes(arguments.memory_budget, "--memory-budget", usual.memory_budget),
        offload_weights=_bytes(arguments.offload_weights, "--offload-weights", usual.offload_weights),
        encoder_cache_bytes=_bytes(arguments.encoder_cache_bytes, "--encoder-cache-bytes", usual.encoder_cache_bytes),
    )
    given = arguments.max_num_batched_tokens
    tokens = SchedulerConfig().max_num_batched_tokens if given is None else given
    if tokens < 1:
        raise OptionError("--max-num-batched-tokens must be positive")
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=tokens)
    quantization, kv_type = arguments.quantization, arguments.kv_cache_dtype
    precisions = tuple(dict.fromkeys((quantization or weights, kv_type or cached) for weights, cached in PRECISIONS))
    return Asked(concurrency=arguments.concurrency, runtime=runtime, scheduler=scheduler, precisions=precisions)
