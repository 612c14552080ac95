"""The configuration of `firstlight serve`: the sections declared beside their owners, composed once, then frozen.

Parsed in the supervisor; handed to the API and engine processes as one JSON line on their standard input.
"""

import argparse
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from model_runtime.config import CACHE_VARIABLE, RuntimeConfig
from scheduler.config import SchedulerConfig
from server.embedded import embedded_mmproj
from server.gateway_config import GatewayConfig
from server.options import ENV_PREFIX, OptionError, collect, options_of
from vision.limits import ImageLimits

EMBEDDED = "embedded"
MAX_REPLICAS = 64
RESERVED_VARIABLES = frozenset({CACHE_VARIABLE, "FIRSTLIGHT_CONFIG"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Where the server listens, and how its processes live and die."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen on"})
    port: int = field(default=8000, metadata={"help": "port to listen on; 0 picks a free one"})
    health_port: int = field(
        default=0,
        metadata={"help": "port on which the supervisor answers /health/* too, however busy the gateway is; 0: none"},
    )
    data_parallel_size: int = field(
        default=1,
        metadata={
            "help": "engines (replicas), each with the whole model; they divide cores and memory budget, and requests "
            "go to one that knows the prompt's beginning or has less to do. max-num-seqs and num-kv-blocks are for "
            "each of them, the limits of what waits for all together"
        },
    )
    shutdown_timeout: float = field(
        default=30.0, metadata={"help": "seconds that accepted requests get to finish after SIGTERM"}
    )
    stall_timeout: float = field(
        default=15.0,
        metadata={
            "help": "seconds without a sign of life until an engine counts as unready, and is killed and restarted"
        },
    )
    step_timeout: float = field(
        default=120.0, metadata={"help": "seconds that one step of the engine may take before it counts as stuck"}
    )
    min_free_memory: int = field(
        default=128 * 1024 * 1024,
        metadata={
            "help": "memory of the machine or container that stays free: with less, new requests get 429; below "
            "twice as much, caches are emptied; 0: do not look",
            "unit": "bytes",
        },
    )
    fault_hooks: bool = field(
        default=False,
        metadata={"help": "for tests only: requests with the cache salt fault:ACTION@POINT do that (server/faults.py)"},
    )
    log_level: Literal["debug", "info", "warning", "error"] = field(
        default="info", metadata={"help": "least severe log message that is shown"}
    )

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the rule."""
        if not 0 <= min(self.port, self.health_port) <= max(self.port, self.health_port) <= 65535:
            raise ValueError("port and health_port must be from 0 to 65535")
        if not 1 <= self.data_parallel_size <= MAX_REPLICAS:
            raise ValueError(f"data_parallel_size must be from 1 to {MAX_REPLICAS}")
        if min(self.shutdown_timeout, self.min_free_memory) < 0:
            raise ValueError("shutdown_timeout and min_free_memory must not be negative")
        if min(self.stall_timeout, self.step_timeout) <= 0:
            raise ValueError("stall_timeout and step_timeout must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Everything that `firstlight serve` was told."""

    model: str = EMBEDDED
    """A folder with a Hugging Face checkpoint, a GGUF file, or 'embedded'."""
    process: ProcessConfig = field(default_factory=ProcessConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    images: ImageLimits = field(default_factory=ImageLimits)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        """Raises ValueError for what does not go together."""
        if self.process.data_parallel_size > 1 and self.runtime.nnodes > 1:
            raise ValueError("data_parallel_size above 1 is for one machine: nnodes must be 1")
        if self.process.data_parallel_size > 1 and self.runtime.device != "cpu":
            raise ValueError("data_parallel_size above 1 is only for --device cpu")


SECTIONS: dict[str, type] = {
    "process": ProcessConfig,
    "gateway": GatewayConfig,
    "images": ImageLimits,
    "scheduler": SchedulerConfig,
    "runtime": RuntimeConfig,
}


def add_arguments(parser: argparse.ArgumentParser, sections: Iterable[str] = tuple(SECTIONS)) -> None:
    """Declare MODEL, --config and one flag for each field of the sections named."""
    parser.add_argument(
        "model", nargs="?", default=None, metavar="MODEL", help="checkpoint folder, GGUF file or 'embedded' (default)"
    )
    parser.add_argument("--config", default=None, metavar="FILE", help="YAML file of option names and values")
    for name in sections:
        section = SECTIONS[name]
        group = parser.add_argument_group(f"{name} options", (section.__doc__ or "").splitlines()[0])
        for option in options_of([section]):
            option.add_to(group)


class _StrictLoader(yaml.SafeLoader):
    """YAML whose mappings name each key once; '-' and '_' are the same in a key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """Raises yaml.YAMLError for a key that comes twice."""
        keys = [str(key.value).replace("-", "_") for key, _ in node.value]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise yaml.YAMLError(f"{twice[0]} is given twice")
        return super().construct_mapping(node, deep)


def _read_yaml(path: str | None) -> dict[str, object]:
    if path is None:
        return {}
    try:
        document = yaml.load(Path(path).read_text(), Loader=_StrictLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(f"cannot read the configuration file {path}: {error}") from None
    if not isinstance(document, dict | None):
        raise OptionError(f"{path} must be a mapping of option names to values")
    return document or {}


def _check_variables(environment: Mapping[str, str], known: set[str]) -> None:
    unknown = sorted(key for key in environment if key.startswith(ENV_PREFIX) and key not in known | RESERVED_VARIABLES)
    if unknown:
        raise OptionError(f"unknown environment variable {unknown[0]}; firstlight has no such option")


def resolve(arguments: argparse.Namespace, environment: Mapping[str, str]) -> ServeConfig:
    """The frozen configuration. Raises OptionError with a message for the user."""
    options = options_of(list(SECTIONS.values()))
    _check_variables(environment, {option.variable for option in options} | {ENV_PREFIX + "MODEL"})
    document = _read_yaml(arguments.config or environment.get("FIRSTLIGHT_CONFIG"))
    in_file = document.pop("model", EMBEDDED)
    if not isinstance(in_file, str):
        raise OptionError(f"configuration file, model: cannot be {type(in_file).__name__}")
    model = arguments.model or environment.get(ENV_PREFIX + "MODEL") or in_file
    values = collect(options, vars(arguments), environment, document)
    if model == EMBEDDED and "mmproj" not in values[RuntimeConfig]:
        values[RuntimeConfig]["mmproj"] = embedded_mmproj()
    try:
        sections = {name: section(**values[section]) for name, section in SECTIONS.items()}
        return ServeConfig(model=model, **sections)
    except ValueError as error:
        raise OptionError(str(error)) from None


def to_json(config: ServeConfig) -> bytes:
    """One line for the child processes."""
    return msgspec.json.encode(config)


def from_json(line: bytes) -> ServeConfig:
    """The inverse of `to_json`."""
    return msgspec.json.decode(line, type=ServeConfig)
