"""Reference values from transformers, by hooks on its modules, when `firstlight align --reference transformers` or
`--dump` asks for them. Process of that command.

Modules are found by the checkpoint keys of their weights, so there is no table of families here. What has no module is
taken at functions: queries and keys behind their rotation where attention is called, and the weights of experts where
these are.

Legend: L tokens of a prompt, C hidden size, N experts.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from model_runtime.align.pictures import Picture
from model_runtime.align.places import VISION, is_place, layer_of, module_path, vision_path
from model_runtime.align.prompts import Prompts
from model_runtime.align.reference import Reference
from model_runtime.architecture import ModelConfig
from model_runtime.models.decoder import TIED_HEAD_KEY, decoder_table
from model_runtime.weights.sides import language_key
from model_runtime.weights.spelling import spelling_of
from vision.tower_config import VisionTowerConfig
from vision.weights import vision_key, vision_table

_LAYER = re.compile(r"layers\.\d+")
_ATTENTION = "eager_attention_forward"


@dataclass(slots=True)
class _Hooks:
    """What a forward pass computes at places."""

    places: dict[str, list[Tensor]] = field(default_factory=dict)
    """By place: a tensor [L, width] of each prompt."""
    aliases: dict[str, str] = field(default_factory=dict)
    """As in `Reference`."""
    _length: int = 0
    _seen: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    """What is kept already in this pass, by address, with its place."""

    def begin(self, length: int) -> None:
        """A prompt of so many tokens comes."""
        self._length = length
        self._seen.clear()

    def output(self, place: str, found: Tensor) -> None:
        """Keep what has a row for each token."""
        self._seen[found.data_ptr()] = (place, found)
        rows = self._rows(found)
        if len(rows) == self._length:
            self.places.setdefault(place, []).append(rows)

    def of_tower(self, place: str, found: Tensor) -> None:
        """Keep all rows; of a convolution's result patch after patch."""
        if found.data_ptr() in self._seen:
            self.aliases[place] = self._seen[found.data_ptr()][0]
        elif found.dim() < 4 and found.is_floating_point():
            self._seen[found.data_ptr()] = (place, found)
            self.places.setdefault(place, []).append(found.flatten(0, -2).float().cpu().clone())

    def input(self, place: str, found: Tensor) -> None:
        """Keep what is not kept already."""
        if found.data_ptr() in self._seen:
            self.aliases[place] = self._seen[found.data_ptr()][0]
        else:
            self.output(place, found)

    def _rows(self, found: Tensor) -> Tensor:
        """[1, L, ..], [1, heads, L, D], or [L, X] -> [L, X], float32 on CPU."""
        if found.dim() == 4 and found.shape[1] != self._length:
            found = found.transpose(1, 2)
        rows = found[0].flatten(1) if found.dim() > 2 else found
        return rows.float().cpu().clone()


class _Watcher:
    """Puts hooks on a model."""

    def __init__(self, model: nn.Module, config: ModelConfig, hooks: _Hooks, side: VisionTowerConfig | None) -> None:
        self._model, self._config, self._hooks = model, config, hooks
        self._spelling = spelling_of(config)
        table = decoder_table(config)
        keys = {slot.key for parameter in table if parameter.expert is None for slot in parameter.slots}
        self._keys = {key for key in keys if is_place(key)} | {TIED_HEAD_KEY}
        self._image_keys = set() if side is None else {key for entry in vision_table(side) for key in entry.keys}

    def watch(self) -> Iterator[Callable[[], None]]:
        """What takes each hook off."""
        for name, module in self._model.named_modules():
            key = vision_key(f"{name}.weight")
            if key in self._image_keys and not isinstance(module, nn.Embedding):
                yield module.register_forward_hook(self._of_tower(vision_path(key))).remove
                continue
            path = self._path(name)
            if _LAYER.fullmatch(path):
                yield module.register_forward_pre_hook(self._layer(path), with_kwargs=True).remove
            if (hook := self._hook(name, path, module)) is not None:
                yield module.register_forward_hook(hook).remove
        files = {type(module).__module__ for module in self._model.modules()}
        for file in sorted(files):
            if hasattr(sys.modules[file], _ATTENTION):
                yield self._watch_attention(sys.modules[file])

    def _path(self, name: str) -> str:
        return module_path(next(iter(self._spelling(f"{language_key(name)}.weight", 1)), name))

    def _parts(self, name: str, module: nn.Module) -> dict[str, slice]:
        """Places of the columns of a module's result."""
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is None or isinstance(module, nn.Embedding):
            return {}
        parts = self._spelling(f"{language_key(name)}.weight", len(weight))
        return {module_path(key): columns for key, columns in parts.items() if key in self._keys}

    def _hook(self, name: str, path: str, module: nn.Module) -> Callable[..., None] | None:
        parts, last = self._parts(name, module), path.rpartition(".")[2]
        if parts:
            return self._router(path) if path.endswith("mlp.gate") else self._weighted(parts)
        if _LAYER.fullmatch(path) or (last == "mlp" and hasattr(module, "experts")):
            return self._whole(path)
        if last == "experts" and layer_of(path) is not None:
            return self._experts(path.removesuffix(".experts"))
        return None

    def _layer(self, path: str) -> Callable[..., None]:
        """What comes in is kept when the layer begins, for some change it."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._hooks.output(f"{path}.in", args[0] if args else kwargs["hidden_states"])

        return before

    def _weighted(self, parts: dict[str, slice]) -> Callable[..., None]:
        first = next(iter(parts))

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._hooks.input(f"{first}.in", args[0])
            if len(parts) == 1:
                self._hooks.output(f"{first}.out", _first(output))
                return
            for path, columns in parts.items():
                self._hooks.output(f"{path}.out", output[..., columns])

        return hook

    def _of_tower(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._hooks.of_tower(f"{path}.in", args[0])
            self._hooks.of_tower(f"{path}.out", _first(output))

        return hook

    def _whole(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._hooks.output(f"{path}.out", _first(output))

        return hook

    def _router(self, path: str) -> Callable[..., None]:
        """Its logits, whatever it makes of them."""

        def hook(module: Any, args: Any, output: Any) -> None:
            rows_LC = args[0].reshape(-1, args[0].shape[-1])
            self._hooks.input(f"{path}.in", args[0])
            bias_N = getattr(module, "bias") if hasattr(module, "bias") else None  # noqa: B009
            self._hooks.output(f"{path}.out", nn.functional.linear(rows_LC, module.weight, bias_N))

        return hook

    def _experts(self, path: str) -> Callable[..., None]:
        """Rows, chosen experts, their weights."""
        assert self._config.experts is not None
        num_experts = self._config.experts.num_experts

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if len(args) != 3:  # Llama 4 weighs what experts take
                return
            _, expert_LK, weight_LK = args
            weights_LN = weight_LK.new_zeros(len(expert_LK), num_experts)
            self._hooks.output(f"{path}.routing.out", weights_LN.scatter_(1, expert_LK, weight_LK))

        return hook

    def _watch_attention(self, file: Any) -> Callable[[], None]:
        """Queries and keys as attention gets them."""
        inner = getattr(file, _ATTENTION)
        paths = {id(module): self._path(name) for name, module in self._model.named_modules()}
        config, hooks = self._config, self._hooks

        def watched(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **rest: Any) -> Any:
            path = paths[id(module)]
            if layer_of(f"{path}.") is not None:
                turned = query, key
                if config.latent is not None:
                    as_halves = _swaps(module)
                    width = config.latent.shared_dim
                    turned = _shared(query, width, as_halves), _shared(key[:, :1], width, as_halves)
                for side, heads in zip("qk", turned, strict=True):
                    hooks.output(f"{path}.{side}_rope.out", heads.transpose(1, 2))
            return inner(module, query, key, *args, **rest)

        setattr(file, _ATTENTION, watched)
        return lambda: setattr(file, _ATTENTION, inner)


def _shared(heads: Tensor, width: int, as_halves: bool) -> Tensor:
    """The last channels of heads [1, H, L, D], neighbours beside each other that rotate together, which DeepSeek-V3's
    are not there."""
    last = heads[..., -width:]
    return torch.stack(last.chunk(2, dim=-1), dim=-1).flatten(-2) if as_halves else last


def _swaps(module: Any) -> bool:
    """Whether its attention puts neighbours apart before it rotates them."""
    return hasattr(module.config, "rope_interleave") and bool(module.config.rope_interleave)


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _is_whole(name: str, parts: list[Tensor], prompts: Prompts) -> bool:
    return len(parts) == (1 if name.startswith(VISION) else len(prompts))


@contextmanager
def _watched(model: nn.Module, config: ModelConfig, hooks: _Hooks, side: VisionTowerConfig | None) -> Iterator[None]:
    with ExitStack() as stack:
        for remove in _Watcher(model, config, hooks, side).watch():
            stack.callback(remove)
        yield


@torch.inference_mode()
def run_transformers(
    model: nn.Module,
    config: ModelConfig,
    prompts: Prompts,
    dtype: torch.dtype,
    side: VisionTowerConfig | None = None,
    picture: Picture | None = None,
) -> Reference:
    """Each prompt in one pass. The first one has a picture, if there is any, whose tower is `side`."""
    import transformers

    hooks, logits = _Hooks(), []
    with _watched(model, config, hooks, side):
        for index, prompt in enumerate(prompts):
            hooks.begin(len(prompt))
            ids_1L = torch.tensor([prompt])
            given = {} if picture is None or index else picture.arguments(ids_1L)
            logits.append(model(input_ids=ids_1L, use_cache=False, **given).logits[0].float())
    return Reference(
        prompts=prompts,
        places={name: torch.cat(parts) for name, parts in hooks.places.items() if _is_whole(name, parts, prompts)},
        picture=picture,
        aliases=hooks.aliases,
        logits_LV=torch.cat(logits),
        made_by=f"transformers {transformers.__version__} in {str(dtype).removeprefix('torch.')}",
        dtype=dtype,
    )
