"""Models of transformers as references: read by it, or filled with what the product's weights stand for, so that
integers are compared with the floats that they mean. With `transformers_reference.py` the only user of transformers, in
the process of `firstlight align`.

Legend: N experts, F intermediate features, C hidden size.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model_runtime.architecture import ModelConfig
from model_runtime.checkpoint import load_model
from model_runtime.config import Quantization
from model_runtime.models.decoder import TIED_HEAD_KEY, decoder_table
from model_runtime.opening import Opened
from model_runtime.ops.matrices import expanded
from model_runtime.ops.registry import select
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.load import Precision
from model_runtime.weights.sides import language_key
from model_runtime.weights.source import read, whole
from model_runtime.weights.spelling import spelling_of
from model_runtime.weights.table import Parameter, Parameters
from vision.weights import vision_key

EXTRA = "pip install 'firstlight[align]'"


def load_transformers(path: Path, dtype: torch.dtype) -> nn.Module:
    """A folder's model as transformers reads it. Raises CheckpointError where that is missing or cannot."""
    options = {"dtype": dtype, "attn_implementation": "eager", "local_files_only": True}
    return _made(path, lambda loader, config: loader.from_pretrained(path, **options))


def load_filled(opened: Opened, quantization: Quantization) -> nn.Module:
    """A model in float32 with the numbers that the product's weights stand for, quantised as it would quantise them.
    An image side apart brings the configuration for both. Raises CheckpointError where transformers is missing, or has
    a parameter that the product has not."""

    def make(loader: Any, read: Any) -> nn.Module:
        from transformers.initialization import no_init_weights

        if hasattr(read, "quantization_config"):
            del read.quantization_config  # weights are filled in as floats
        with no_init_weights():  # all are filled, or it fails
            made = loader.from_config(read, attn_implementation="eager", dtype=torch.float32)
        made.tie_weights()
        tied: nn.Module = made
        return tied

    model = _made(opened.image_folder or opened.path, make)
    device = torch.device("cpu")
    precision = Precision(quantization=quantization, row_bits=0)
    loaded = load_model(opened, select("any"), device, lambda fraction: None, None, precision)
    _fill(model, opened, loaded.decoder.parameters)
    return model


def _made(path: Path, make: Callable[[Any, Any], nn.Module]) -> nn.Module:
    """What is made with a loader and the configuration that transformers reads."""
    try:
        import transformers
    except ImportError:
        raise CheckpointError(
            f"the reference needs transformers, which is not installed: {EXTRA}, or give --reference a file that was "
            "written with --dump on a machine that has it"
        ) from None
    folder, file = (path, None) if path.is_dir() else (path.parent, path.name)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, gguf_file=file)
        has_images = hasattr(config, "text_config")
        loader = transformers.AutoModelForImageTextToText if has_images else transformers.AutoModelForCausalLM
        return make(loader, config).eval()
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(f"transformers cannot read {path}: {error}") from None


class _Values:
    """The product's weights by plain key, as floats."""

    def __init__(self, config: ModelConfig, parameters: Parameters) -> None:
        self._parameters = parameters
        self._holders: dict[str, tuple[Parameter, slice]] = {}
        for parameter in decoder_table(config):
            end = 0
            for slot in parameter.slots:
                self._holders[slot.key] = (parameter, slice(end, end + slot.rows))
                end += slot.rows

    def __contains__(self, key: object) -> bool:
        return key in self._holders

    def __getitem__(self, key: str) -> Tensor:
        parameter, rows = self._holders[key]
        if parameter.columns is None:
            return self._parameters.vectors[parameter.name][rows] - parameter.added
        weight = self._parameters.matrices[parameter.name]
        return expanded(weight, weight.data).float()[rows]


@torch.no_grad()
def _fill(model: nn.Module, opened: Opened, parameters: Parameters) -> None:
    config, images = opened.config, {} if opened.side is None else opened.side.source
    values, spelling = _Values(config, parameters), spelling_of(config)
    for name, tensor in model.state_dict().items():
        key = vision_key(name)
        if key is not None and key in images:
            tensor.copy_(read(images[key], whole(images[key].shape)))
            continue
        plain = language_key(name)
        parts = spelling(plain, len(tensor))
        if all(key in values for key in parts):
            tensor.copy_(torch.cat([values[key] for key in parts]).view(tensor.shape))
        elif (stacked := _stacked(plain, tensor.shape, values)) is not None:
            tensor.copy_(stacked)
        elif plain != TIED_HEAD_KEY or not config.tie_word_embeddings:
            raise CheckpointError(f"{name} of transformers' model has no like in the product's weights")


def _stacked(key: str, shape: torch.Size, values: _Values) -> Tensor | None:
    """Matrices of all experts of a layer in one tensor: gate above up, and down."""
    owner, _, name = key.rpartition(".")
    names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(name, ())
    keys = [[f"{owner}.{expert}.{part}.weight" for part in names] for expert in range(shape[0])]
    if not names or not all(key in values for parts in keys for key in parts):
        return None
    stack = torch.stack([torch.cat([values[key] for key in parts]) for parts in keys])
    return stack if stack.shape == shape else None
