"""Which device computes, how much of its memory may be taken, and the type of activations there. Called by executor and
`checkpoint.py` while a model is loaded, engine and worker processes.

The CUDA path was written without a card and has not run on one yet; what could be tested on a CPU was.
"""

import logging
from contextlib import suppress

import torch

from model_runtime import host
from model_runtime.huge_pages import trim_heap
from model_runtime.memory.budget import PlanError

logger = logging.getLogger(__name__)

OLDEST_CAPABILITY = (8, 0)
"""Of NVIDIA's Ampere cards: those before lack bfloat16 and torch's flash attention."""


def choose_device(asked: str) -> torch.device:
    """A device by torch's name for it, with a number if there are several. Raises PlanError where it cannot be used."""
    device = _named(asked)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        return _working(device)
    if problem := _cuda_problem():
        raise PlanError(f"device cuda cannot be used: {problem}; set device to cpu")
    logger.warning("computing on %s: this path has not been tested on a card", torch.cuda.get_device_name())
    _accumulate_in_float32()
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _named(asked: str) -> torch.device:
    try:
        return torch.device(asked)
    except RuntimeError:
        raise PlanError(
            f"torch {torch.__version__} knows no device {asked!r}: set device to cpu, cuda, or what its documentation "
            "lists; a device of another maker needs the maker's package for torch beside it"
        ) from None


def _working(device: torch.device) -> torch.device:
    """The same, once it has computed a sum."""
    if device.type == "meta":
        raise PlanError("device meta computes nothing: set device to cpu")
    try:
        torch.ones(2, device=device).sum().item()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise PlanError(f"device {device} cannot be used: {str(error).splitlines()[0]}; set device to cpu") from None
    logger.warning("computing on %s with plain torch operations: see docs/new-accelerator.md", device)
    return device


def _cuda_problem() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    found = torch.cuda.get_device_capability()
    if found < OLDEST_CAPABILITY:
        needed = ".".join(map(str, OLDEST_CAPABILITY))
        return f"{torch.cuda.get_device_name()} has compute capability {found[0]}.{found[1]}, needed is {needed}"
    return None


def _accumulate_in_float32() -> None:
    """Products of float16 and bfloat16 matrices: partial sums of a product that is cut along K stay float32 too."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def default_budget(device: torch.device) -> int:
    """Bytes for weights, activations and KV cache: half of the free memory, of a GPU's nine tenths, since there only
    captured graphs and libraries need the rest."""
    if device.type == "cpu":
        return host.default_budget()
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free * 9 // 10
    try:
        free, _ = torch.accelerator.get_memory_info(device)
    except (RuntimeError, ValueError, AttributeError):
        raise PlanError(f"torch cannot tell how much memory {device} has: set memory_budget") from None
    return free * 9 // 10


def activation_dtype(device: torch.device, stored: torch.dtype | None, exact: bool) -> torch.dtype:
    """What hidden states are held in: on a GPU the type that the checkpoint's floats have, bfloat16 beside integers
    (`stored` None); float32 on CPU, or where `exact` asks for it. Sums are float32 everywhere."""
    if device.type == "cpu" or exact:
        return torch.float32
    return torch.bfloat16 if stored is None else stored


def usual_kv_dtype(activations: torch.dtype, integer_rows: bool) -> torch.dtype:
    """What keys and values are stored in unless something else is asked for: the type of hidden states, but float16 for
    float32 where rows meet matrices of integers, whose numbers are far coarser."""
    return torch.float16 if integer_rows and activations == torch.float32 else activations


def give_back_memory(device: torch.device) -> None:
    """To the system, what torch or the C library keeps of freed tensors for the next ones."""
    trim_heap()
    if device.type not in ("cpu", "meta"):
        with suppress(RuntimeError):  # of makers whose packages keep no such memory
            torch.accelerator.empty_cache()
