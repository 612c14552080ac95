"""Reference values from transformers, by hooks on its modules, when `firstlight align --reference transformers` or
`--dump` asks for them. Process of that command.

Modules are found by the checkpoint keys of their weights, so there is no table of families here. What has no module is
taken at functions: queries and keys behind their rotation where attention is called, and the weights of experts where
these are.

Legend: L tokens of a prompt, C hidden size, N experts.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model_runtime.align.places import is_place, layer_of, module_path
from model_runtime.align.prompts import Prompts, cut_prompts, lengths_for, seeded_prompts
from model_runtime.align.reference import DTYPES, DtypeName, Reference
from model_runtime.align.transformers_model import load_filled, load_transformers
from model_runtime.architecture import ModelConfig
from model_runtime.config import Quantization
from model_runtime.models.decoder import TIED_HEAD_KEY, decoder_table
from model_runtime.opening import open_checkpoint
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.sides import language_key
from model_runtime.weights.spelling import spelling_of

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

    def __init__(self, model: nn.Module, config: ModelConfig, hooks: _Hooks) -> None:
        self._model, self._config, self._hooks = model, config, hooks
        self._spelling = spelling_of(config)
        table = decoder_table(config)
        keys = {slot.key for parameter in table if parameter.expert is None for slot in parameter.slots}
        self._keys = {key for key in keys if is_place(key)} | {TIED_HEAD_KEY}

    def watch(self) -> Iterator[Callable[[], None]]:
        """What takes each hook off."""
        for name, module in self._model.named_modules():
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


@contextmanager
def _watched(model: nn.Module, config: ModelConfig, hooks: _Hooks) -> Iterator[None]:
    with ExitStack() as stack:
        for remove in _Watcher(model, config, hooks).watch():
            stack.callback(remove)
        yield


@torch.inference_mode()
def run_transformers(model: nn.Module, config: ModelConfig, prompts: Prompts, dtype: torch.dtype) -> Reference:
    """Each prompt in one pass."""
    import transformers

    hooks, logits = _Hooks(), []
    with _watched(model, config, hooks):
        for prompt in prompts:
            hooks.begin(len(prompt))
            logits.append(model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float())
    return Reference(
        prompts=prompts,
        places={name: torch.cat(parts) for name, parts in hooks.places.items() if len(parts) == len(prompts)},
        aliases=hooks.aliases,
        logits_LV=torch.cat(logits),
        made_by=f"transformers {transformers.__version__} in {str(dtype).removeprefix('torch.')}",
        dtype=dtype,
    )


def reference_of(path: Path, dtype: DtypeName, quantization: Quantization, text: Sequence[int]) -> Reference:
    """Of a checkpoint, for prompts that fit it, from the beginning of `text` as far as there is any. What the product
    holds as integers is compared with the floats that these mean, and beside it are the logits of the checkpoint's own
    floats, if it has them. Raises CheckpointError."""
    opened = open_checkpoint(path)
    config = opened.config
    lengths = lengths_for((*config.sliding_windows, *config.attention_chunks), config.max_position)
    is_enough = len(text) >= sum(lengths) and max(text) < config.vocab_size
    prompts = cut_prompts(text, lengths) if is_enough else seeded_prompts(lengths, config.vocab_size)
    stored = any(tensor.format is not None for tensor in opened.source.values())
    if quantization == "none" and not stored:
        return run_transformers(load_transformers(path, DTYPES[dtype]), config, prompts, DTYPES[dtype])
    if dtype != "float32":
        raise CheckpointError("weights of integers are compared in float32: leave --dtype out")
    full_LV = None
    if not stored:
        full_LV = run_transformers(load_transformers(path, torch.float32), config, prompts, torch.float32).logits_LV
    filled = run_transformers(load_filled(path, config, quantization), config, prompts, torch.float32)
    made_by = f"{filled.made_by} with {'the integers of the file' if stored else quantization} expanded"
    return replace(filled, made_by=made_by, full_LV=full_LV, quantization=quantization)
