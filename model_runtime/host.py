"""What this machine, or the container around this process, lets it use: memory and cores. Asked once at the start
of the API process (threads for images) and of the engine (threads to compute, memory); does not import torch."""

import os
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def available_memory(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> int:
    """Bytes that can be taken without swapping: what the system has, or less where a control group says so."""
    return min([psutil.virtual_memory().available, *_memory_left(root, own)])


def default_budget() -> int:
    """Bytes for weights, activations and KV cache on CPU: half of the free memory."""
    return available_memory() // 2


def usable_cores(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> int:
    """Cores that this process may run on, or fewer where a control group's CPU quota is less; at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *_core_quotas(root, own)]))


def _groups(root: Path, own: Path, controller: str) -> list[Path]:
    """Folders of the control groups that this process is in, up to the root, version 2 and version 1."""
    if not own.exists():
        return []
    folders: list[Path] = []
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / controller if controllers else root
        relative = Path(path.lstrip("/"))
        folders += [base / part for part in (relative, *relative.parents)]
    return folders


def _numbers(path: Path) -> list[int]:
    """The integers of a control file; none where the file is absent or says `max`."""
    if not path.is_file():
        return []
    return [int(word) for word in path.read_text().split() if word.lstrip("-").isdigit()]


def _reclaimable(folder: Path) -> int:
    """Bytes of page cache that count as used but are given back on demand."""
    stat = folder / "memory.stat"
    if not stat.is_file():
        return 0
    values = dict(line.split(" ", 1) for line in stat.read_text().splitlines())
    return int(values.get("total_inactive_file", values.get("inactive_file", "0")))


def _memory_left(root: Path, own: Path) -> list[int]:
    left = []
    for folder in _groups(root, own, "memory"):
        for limit_file, usage_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            for limit in _numbers(folder / limit_file):
                used = sum(_numbers(folder / usage_file)) - _reclaimable(folder)
                left.append(max(0, limit - used))
    return left


def _core_quotas(root: Path, own: Path) -> list[int]:
    quotas = []
    for folder in _groups(root, own, "cpu"):
        pair = _numbers(folder / "cpu.max")
        if not pair:
            pair = _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
        if len(pair) == 2 and pair[0] > 0:
            quotas.append(-(-pair[0] // pair[1]))
    return quotas


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that is no file's. Raises OSError, ValueError where the system does not tell."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise ValueError("smaps_rollup has no line 'Anonymous:'")
