"""Models with images: tower, projector and what the language model gets are compared with transformers, and what is
wrong there is named."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_runtime.align import run
from model_runtime.align.compare import Alignment, align
from model_runtime.align.product import Product, load_ranks, open_product
from model_runtime.align.reference import load_reference
from model_runtime.align.references import reference_of
from model_runtime.align.tracer import Recorder
from model_runtime.config import Quantization, RuntimeConfig
from model_runtime.opening import open_checkpoint
from tests.align.cases import Aligned
from tests.apart import write_apart
from tests.vlm import make_vlm
from vision.encoder.model import ImageEncoder, ImageFeatures, ImageInput

NAMES = ("llava-clip", "gemma3", "qwen2_5_vl", "qwen3_vl", "mistral3", "kimi_k25")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Aligned]:
    @cache
    def made(name: str) -> Aligned:
        folder = tmp_path_factory.mktemp(name)
        make_vlm(folder, name)
        return Aligned(folder, reference_of(open_checkpoint(folder), "float32", RuntimeConfig(), ()))

    return made


@pytest.mark.parametrize("name", NAMES)
def test_aligned(checkpoint: Callable[[str], Aligned], name: str) -> None:
    found = checkpoint(name).compared()
    assert found.passed, found.first
    tower = [place for place in found.places if place.place.startswith("vision.")]
    # transformers calls the modules of Kimi's tower otherwise than its files do
    assert len(tower) >= (2 if name == "kimi_k25" else 25)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_an_image_side_apart(tmp_path: Path, quantization: Quantization) -> None:
    """The reference is put together as the product is, and tower and language model are compared."""
    make_vlm(tmp_path / "whole", "llava-siglip")
    text, images = tmp_path / "text", tmp_path / "images"
    write_apart(tmp_path / "whole", text, images)
    runtime = RuntimeConfig(mmproj=str(images), quantization=quantization, prepare_weights=False, threads=1)
    product = open_product(text, runtime)
    reference = reference_of(product.opened, "float32", runtime, ())
    found = align(load_ranks(product, lambda fraction: None), reference)
    assert found.passed, found.first
    assert sum(place.place.startswith("vision.") for place in found.places) >= 25
    assert (reference.full_LV is not None) == (quantization == "int8")


def test_a_picture_in_a_file(checkpoint: Callable[[str], Aligned], tmp_path: Path) -> None:
    aligned = checkpoint("qwen2_5_vl")
    path = tmp_path / "reference.safetensors"
    aligned.reference.save(path)
    read = load_reference(path)
    assert read.picture is not None and aligned.reference.picture is not None
    assert read.picture.image.grid == aligned.reference.picture.image.grid
    assert align([*aligned.product()], read).passed


def assert_first(found: Alignment, place: str, kind: str, words: str) -> None:
    assert not found.passed and found.first is not None
    assert (found.first.place, found.first.kind) == (place, kind)
    assert words in found.suspects[0]


def test_a_transposed_projector(checkpoint: Callable[[str], Aligned]) -> None:
    def broken(product: Product) -> None:
        vision = product.model.vision
        assert vision is not None
        matrices = vision.encoder.parameters.matrices
        matrix = matrices["projector.second"]

        def transposed(x_TK: Tensor) -> Tensor:
            bias_N = matrix(torch.zeros(1, x_TK.shape[1]))
            return x_TK @ (matrix(torch.eye(x_TK.shape[1])) - bias_N).T + bias_N

        assert isinstance(matrices, dict)
        matrices["projector.second"] = transposed

    found = checkpoint("llava-clip").compared(broken=broken)
    assert_first(found, "vision.multi_modal_projector.linear_2.out", "linear", "transposed")


def test_exchanged_matrices(checkpoint: Callable[[str], Aligned]) -> None:
    def broken(product: Product) -> None:
        vision = product.model.vision
        assert vision is not None and isinstance(vision.encoder.parameters.matrices, dict)
        matrices = vision.encoder.parameters.matrices
        matrices["deepstack.0.first"], matrices["deepstack.1.first"] = (
            matrices["deepstack.1.first"],
            matrices["deepstack.0.first"],
        )

    found = checkpoint("qwen3_vl").compared(broken=broken)
    assert_first(found, "vision.visual.deepstack_merger_list.0.linear_fc1.out", "linear", "")


def test_deepstack_features_are_missing(checkpoint: Callable[[str], Aligned], monkeypatch: pytest.MonkeyPatch) -> None:
    """The language model adds nothing behind its first layer."""
    whole = run.encoded

    def without(encoder: ImageEncoder, image: ImageInput, recorder: Recorder | None) -> ImageFeatures:
        features = whole(encoder, image, recorder)
        return replace(features, deepstack_NO=tuple(map(torch.zeros_like, features.deepstack_NO)))

    aligned = checkpoint("qwen3_vl")
    monkeypatch.setattr(run, "encoded", without)
    assert_first(aligned.compared(), "layers.1.in", "residual", "deepstack")
