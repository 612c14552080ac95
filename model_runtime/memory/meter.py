"""What was planned beside what it really takes: logged after loading, and after the first large step. Made by
`executor.py`, engine and worker processes.

On CPU the system counts, as Linux does: pages that were touched. What is in use it knows exactly, a peak to 32 pages or
more for each processor that it was reached on, in which it adds them up. On other devices torch's allocator counts.
"""

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from model_runtime.config import RuntimeInfo
from model_runtime.device import give_back_memory
from scheduler.plan import StepPlan

logger = logging.getLogger(__name__)

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""What Linux wants to be told (proc(5), clear_refs)."""


def mib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**20:.1f} MiB"


class MemoryMeter:
    """Reads how much memory is in use. Where nobody tells, it has always been 0."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before, self._used = device, 0, 0

    def used(self) -> int:
        """Bytes now, without mapped files."""
        if self._device.type != "cpu":
            return _told(lambda: torch.accelerator.memory_allocated(self._device))
        return _status("RssAnon")

    def begin(self) -> None:
        """From here on the most is looked for; above what there was before, where the system does not forget that."""
        give_back_memory(self._device)  # as `end` does, for what is freed between would count as less
        if self._device.type != "cpu":
            _told(lambda: torch.accelerator.reset_peak_memory_stats(self._device))
        elif CLEAR_REFS.exists():
            with suppress(OSError):  # some containers forbid it
                CLEAR_REFS.write_text(RESET_PEAK)
        self._before, self._used = self._most(), self.used()

    def end(self) -> tuple[int, int]:
        """(the most since `begin`, above what was in use then and what has stayed since; what has stayed)."""
        most = self._most() - self._before
        give_back_memory(self._device)
        stayed = max(0, self.used() - self._used)
        return max(0, most - stayed), stayed

    def _most(self) -> int:
        if self._device.type != "cpu":
            return _told(lambda: torch.accelerator.max_memory_allocated(self._device))
        return _status("VmHWM")


def _told(ask: Callable[[], int | None]) -> int:
    """What torch says of a device, or 0 of one whose maker's package does not count."""
    try:
        return ask() or 0
    except (AttributeError, NotImplementedError, RuntimeError):
        return 0


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    return 0 if found is None else int(found[1]) * 1024


def log_loaded(rank: int, planned: int, loaded: int, grown: int, info: RuntimeInfo) -> None:
    """Of one rank."""
    logger.info(
        "memory of rank %d: weights planned %s, loaded %s; it grew by %s; KV pool of %s",
        rank,
        *map(mib, (planned, loaded, grown, info.kv_bytes)),
    )


class StepWatch:
    """Measures the first step that has at least half of the most tokens."""

    def __init__(self, meter: MemoryMeter, info: RuntimeInfo) -> None:
        self._meter, self._info, self._tokens, self._done = meter, info, 0, False

    def begins(self, plan: StepPlan) -> None:
        """Before it is computed. Other steps may be on their way."""
        if not self._done and not plan.by_draft_model and 2 * len(plan.token_ids) >= self._info.max_num_batched_tokens:
            self._done, self._tokens = True, len(plan.token_ids)
            self._meter.begin()

    def ends(self) -> None:
        """A step has; if it is the one that is watched, its memory is logged."""
        if self._tokens:
            taken, stayed = self._meter.end()
            words = (
                "memory: largest step planned %s; one of %d tokens took %s, and %s stay: new keys and values, buffers"
            )
            logger.info(words, mib(self._info.step_bytes), self._tokens, mib(taken), mib(stayed))
            self._tokens = 0
