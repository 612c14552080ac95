"""A device that is none: its tensors are the CPU's behind a wrapper that torch takes for those of a device `toy`. It
computes what torch computes on CPU, and refuses what a device cannot do: tensors of two devices in one operation, and
reading a tensor's memory. So what runs here takes nothing about CPU or CUDA for granted; how fast a device is, and
which operations it lacks, only the device itself shows.

    python -m tests.model_runtime.toy_device TEXT_MODEL IMAGE_MODEL

serves some prompts there, there with layers in host memory, and on CPU, and prints all answers as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from scheduler.config import SchedulerConfig
from scheduler.plan import ints
from scheduler.request import Request, SamplingParams
from tests.vision.preprocess_pictures import as_pil, picture
from tests.vlm_engine import Engine, Gateway, request

NAME = "toy"
MAY_MIX = ("aten::copy_", "aten::_to_copy", "aten::_copy_from")
"""Operations that carry numbers from one device to the other."""


class ToyTensor(Tensor):
    """A tensor of the device."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "ToyTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=f"{NAME}:0",
        )
        made.raw = raw
        return made  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        """A copy, as from any device; torch makes none of a wrapper."""
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


def run(function: Any, args: Any, kwargs: Any) -> Any:
    """An operation with tensors of the device, or one that makes them."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    own = {id(leaf.raw): leaf for leaf in given if isinstance(leaf, ToyTensor)}
    foreign = [leaf for leaf in given if not isinstance(leaf, ToyTensor) and leaf.dim()]
    name = function._schema.name
    assert not (own and foreign) or name in MAY_MIX, f"{name} of tensors on {NAME} and {foreign[0].device}"
    target = kwargs.get("device")
    stays = torch.device(target).type == NAME if target is not None else bool(own)
    if name == "aten::copy_":
        stays = isinstance(args[0], ToyTensor)
    args, kwargs = tree_map(_on_cpu, (args, kwargs))
    result = function(*args, **kwargs)
    if not stays or name == "aten::_local_scalar_dense":
        return result
    return tree_map(lambda leaf: own[id(leaf)] if id(leaf) in own else _wrapped(leaf), result)


def _wrapped(leaf: Any) -> Any:
    with torch.inference_mode(False):  # in which torch lets no wrapper be a view of a weight
        return ToyTensor(leaf) if isinstance(leaf, Tensor) else leaf


def _on_cpu(leaf: Any) -> Any:
    if isinstance(leaf, ToyTensor):
        return leaf.raw
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def register() -> list[Any]:
    """Make the device known to torch; for the life of this process. What is returned must be kept."""
    _setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("_", "IMPL")

    def fallback(function: Any, *args: Any, **kwargs: Any) -> Any:
        return run(function, args, kwargs)

    library.fallback(fallback, "PrivateUse1")
    return [library]


def _answers(folder: Path, device: str, offload_weights: int = 0) -> list[list[int]]:
    """What the engine says to prompts of several lengths, drawn at random but with a seed."""
    scheduler = SchedulerConfig(max_num_seqs=2)
    engine = Engine(folder, scheduler, device=device, num_kv_blocks=64, offload_weights=offload_weights)
    sampling = SamplingParams(max_tokens=8, temperature=0.7, seed=3)
    prompts = [[index % 250 + 3 for index in range(seq_id, 30 * seq_id + 1)] for seq_id in range(1, 4)]
    requests = (Request(seq_id=i, prompt_ids=ints(prompt), sampling=sampling) for i, prompt in enumerate(prompts))
    return [outcome.token_ids for outcome in engine.run(requests).values()]


def _image_answers(folder: Path, device: str) -> list[list[int]]:
    """The same of a prompt with a picture."""
    engine = Engine(folder, SchedulerConfig(max_num_seqs=2), device=device, num_kv_blocks=64)
    parts = [{"type": "text", "text": "Who is "}, {"type": "image"}, {"type": "text", "text": "?"}]
    prompt = Gateway(folder).prompt([{"role": "user", "content": parts}], [as_pil(picture(90, 60, 0))])
    return [outcome.token_ids for outcome in engine.run([request(0, prompt, 4)]).values()]


def main(text: Path, images: Path) -> None:
    """Two checkpoints."""
    kept = register()
    found = {device: (_answers(text, device), _image_answers(images, device)) for device in (NAME, "cpu")}
    print(json.dumps(found | {"offloaded": _answers(text, NAME, offload_weights=1)}))
    del kept


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
