"""Training that is interrupted goes on where it was: parameters, their averages and the optimizers' state in one file.

Used by the training scripts. A safetensors file, written beside and renamed: whole or old.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer


def optimizer_tensors(optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """The state of every parameter, by number of optimizer, group and parameter."""
    tensors = {}
    for name, parameter, optimizer in _numbered(optimizers):
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}.{key}"] = torch.as_tensor(value)
    return tensors


def fill_optimizers(optimizers: Sequence[Optimizer], tensors: Mapping[str, Tensor]) -> None:
    """What `optimizer_tensors` gave, put back."""
    for name, parameter, optimizer in _numbered(optimizers):
        for key in [key for key in tensors if key.startswith(f"{name}.")]:
            value = tensors[key]
            moved = value if value.dim() == 0 else value.to(parameter.device)
            optimizer.state[parameter][key.removeprefix(f"{name}.")] = moved


def _numbered(optimizers: Sequence[Optimizer]) -> Iterable[tuple[str, nn.Parameter, Optimizer]]:
    for number, optimizer in enumerate(optimizers):
        for index, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                yield f"{number}.{index}.{place}", parameter, optimizer


def save(path: Path, parts: Mapping[str, Mapping[str, Tensor]], progress: Mapping[str, int]) -> None:
    """Named groups of tensors and some numbers."""
    tensors = {
        f"{part}/{name}": tensor.detach().cpu().contiguous().clone()
        for part, group in parts.items()
        for name, tensor in group.items()
    }
    partial = path.with_name(path.name + ".part")
    save_file(tensors, partial, metadata={"progress": json.dumps(dict(progress))})
    partial.replace(path)


def load(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, int]]:
    """What `save` was given."""
    parts: dict[str, dict[str, Tensor]] = {}
    with safe_open(path, "pt") as file:
        names: list[str] = file.keys()
        for full in names:
            part, _, name = full.partition("/")
            parts.setdefault(part, {})[name] = file.get_tensor(full)
        progress = {str(key): int(value) for key, value in json.loads(file.metadata()["progress"]).items()}
    return parts, progress


class Average:
    """A moving average of parameters: what a lowered learning rate would give, at any time."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: value.detach().clone() for name, value in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """After step `step`, from 1; the first values count little."""
        decay = min(self.decay, step / (step + 10))
        for name, value in module.state_dict().items():
            self.tensors[name].lerp_(value, 1 - decay)
