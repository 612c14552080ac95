"""Checkpoints with the reference's values, and the product aligned with some flag flipped."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import model_runtime.opening
from model_runtime.align.compare import Alignment, align
from model_runtime.align.product import Product, load_ranks, open_product
from model_runtime.align.prompts import lengths_for, seeded_prompts
from model_runtime.align.reference import Reference
from model_runtime.align.transformers_reference import run_transformers
from model_runtime.architecture import ModelConfig
from model_runtime.config import RuntimeConfig
from tests.family_cases import make_random_model

Flip = Callable[[ModelConfig], ModelConfig]
Break = Callable[[Product], None]


@dataclass(frozen=True)
class Aligned:
    """A checkpoint and its reference."""

    folder: Path
    reference: Reference

    def product(self, flip: Flip | None = None, runtime: RuntimeConfig | None = None) -> list[Product]:
        """With another architecture than the files say."""
        runtime = runtime or RuntimeConfig(prepare_weights=False, threads=1)
        if flip is None:
            return load_ranks(open_product(self.folder, runtime), lambda fraction: None)
        read = model_runtime.opening.read_hf_config
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_runtime.opening, "read_hf_config", lambda *files: flip(read(*files)))
            return load_ranks(open_product(self.folder, runtime), lambda fraction: None)

    def compared(self, flip: Flip | None = None, broken: Break | None = None, ranks: int = 1) -> Alignment:
        """The product, flipped or broken, against the reference."""
        runtime = RuntimeConfig(prepare_weights=False, threads=1, tensor_parallel_size=ranks)
        product = self.product(flip, runtime)
        if broken is not None:
            broken(product[-1])
        return align(product, self.reference)


def make_aligned(folder: Path, family: str, seed: int) -> Aligned:
    """Of a random model of a family."""
    model = make_random_model(folder, family, seed)
    config = model_runtime.opening.open_checkpoint(folder).config
    prompts = seeded_prompts(
        lengths_for((*config.sliding_windows, *config.attention_chunks), config.max_position), config.vocab_size
    )
    return Aligned(folder, run_transformers(model, config, prompts, torch.float32))
