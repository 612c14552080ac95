"""What to plan for: the text of `--devices`, how much memory each rank may take there, and how fast it is. Called by
`command.py`; does not import torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from model_runtime.host import available_memory
from server.options import OptionError, parse_bytes

GIB = 2**30
MAX_DEVICES = 4096
GRAMMAR = (
    "8x96GiB (devices of a machine x memory of each), 4xH100 (a card of: {}), or 2xcpu, 2xcpu:64GiB (ranks that share "
    "the memory of one machine)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of one device, or of the processors of a machine, as far as it is known."""

    bandwidth: float | None = None
    """Bytes of its memory a second."""
    flops: float | None = None
    """Of matrix products in 16 bits, a second."""
    link: float | None = None
    """Bytes a second from one device to another of the same machine."""
    host_link: float | None = None
    """Bytes a second from the host's memory to a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A device that can be bought: what its maker says of dense products in bfloat16, memory as its driver shows it."""

    memory: float
    """GiB."""
    speed: Speed


def _card(memory: float, bandwidth: float, flops: float, link: float, host_link: float) -> Card:
    """GiB, TB/s, TFLOP/s, GB/s in one direction, and the same of its 16 lanes of PCI Express."""
    speed = Speed(bandwidth=bandwidth * 1e12, flops=flops * 1e12, link=link * 1e9, host_link=host_link * 1e9)
    return Card(memory=memory, speed=speed)


CARDS: Mapping[str, Card] = MappingProxyType(
    {
        "A100-40GB": _card(39, 1.555, 312, 300, 32),
        "A100-80GB": _card(79, 2.039, 312, 300, 32),
        "H100": _card(79, 3.35, 989, 450, 64),
        "H200": _card(139, 4.8, 989, 450, 64),
        "B200": _card(178, 8.0, 2250, 900, 64),
        "L40S": _card(44, 0.864, 362, 32, 32),
        "RTX4090": _card(23.5, 1.008, 165, 32, 32),
        "MI300X": _card(191, 5.3, 1307, 448, 64),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Machines that are alike."""

    kind: Literal["cpu", "cuda"]
    """Whose kernels compute, as `--device` of serve says."""
    name: str
    """For people."""
    count: int
    """Of a machine; on CPU ranks that it can have."""
    nodes: int
    memory: int
    """Bytes of one device, or on CPU of the machine."""
    speed: Speed
    network: float | None
    """Bytes a second from one machine to another."""

    @property
    def total(self) -> int:
        """Devices of all machines."""
        return self.count * self.nodes

    def budget(self, ranks_here: int, memory_budget: int) -> int:
        """Bytes that a rank may take, of so many on its machine: as serve decides it, or of `memory_budget` if any."""
        if memory_budget:
            return memory_budget // ranks_here
        return self.memory // 2 // ranks_here if self.kind == "cpu" else self.memory * 9 // 10


def parse_devices(text: str, nodes: int, given: Speed, network: float | None) -> Devices:
    """`given` goes before what is known of a card. Raises OptionError that says how devices are written."""
    match = re.fullmatch(r"(?:(\d{1,6})\s*x\s*)?(\S+)", text.strip(), re.IGNORECASE)
    mistake = OptionError(f"--devices {text!r} is not of the form {GRAMMAR.format(', '.join(CARDS))}")
    if match is None:
        raise mistake
    count, what = int(match[1] or 1), match[2]
    if not 1 <= count * nodes <= MAX_DEVICES:
        raise OptionError(f"--devices: {count * nodes} devices; from 1 to {MAX_DEVICES} can be planned for")
    card = next((card for name, card in CARDS.items() if name.lower() == what.lower()), None)
    kind, colon, size = what.partition(":")
    is_cpu = kind.lower() == "cpu"
    try:
        memory = parse_bytes(size if is_cpu else what) if card is None and (not is_cpu or colon) else 0
    except ValueError:
        raise mistake from None
    if card is not None:
        memory = int(card.memory * GIB)
    elif is_cpu and not colon:
        memory = available_memory()
    return Devices(
        kind="cpu" if is_cpu else "cuda",
        name=what,
        count=count,
        nodes=nodes,
        memory=memory,
        speed=_merged(given, Speed() if card is None else card.speed),
        network=network,
    )


def _merged(given: Speed, known: Speed) -> Speed:
    return replace(
        known,
        bandwidth=given.bandwidth or known.bandwidth,
        flops=given.flops or known.flops,
        link=given.link or known.link,
        host_link=given.host_link or known.host_link,
    )


_PREFIXES: Mapping[str, float] = MappingProxyType({"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15})


def parse_rate(text: str, unit: Literal["B/s", "FLOP/s"]) -> float:
    """'3.35TB/s', '400 GB/s', '989TFLOP/s'; the unit may be left out. Raises ValueError."""
    units = "b(?:/s)?" if unit == "B/s" else "flops?(?:/s)?"
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:{units})?", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a rate such as {'3.35T' if unit == 'B/s' else '989T'}{unit}")
    return float(match[1]) * _PREFIXES[match[2]]
