"""Times image towers against the machine's limit in one run: `python -m model_runtime.kernels.bench_vision`.

For each tower: images a second one by one and in batches, with the compiled operations and with plain torch, and what
share of the speed of a large product of matrices that is. Weights are random. Numbers from different runs on a shared
machine do not compare; ratios within one do. A command for people.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from model_runtime.images import TowerKernels
from model_runtime.kernels.bench import best_seconds
from model_runtime.ops import load_ops
from vision.encoder.model import ImageEncoder, ImageInput
from vision.encoder.parameters import Kernels
from vision.encoder.readers import read_vision
from vision.tower_config import VisionTowerConfig
from vision.weights import vision_table

BATCH = 8
TEXT_SIZE = 2048
PROJECTED = {"text_config": {"hidden_size": TEXT_SIZE, "model_type": "llama"}}
SIGLIP: Mapping[str, object] = {
    **PROJECTED,
    "model_type": "llava",
    "vision_config": {"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 16},
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
QWEN2: Mapping[str, object] = {
    **PROJECTED,
    "model_type": "qwen2_vl",
    "vision_config": {"depth": 4, "embed_dim": 1280, "num_heads": 16, "hidden_size": TEXT_SIZE},
}
QWEN2_SIDE = 32
"""Rows and columns of patches of an image of 448 x 448 pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A tower and an image for it."""

    name: str
    config: VisionTowerConfig
    image: ImageInput
    num_tokens: int


def cases() -> tuple[Case, ...]:
    """SigLIP-base, and four of the 32 layers of Qwen2-VL's tower."""
    siglip, qwen2 = read_vision(SIGLIP, TEXT_SIZE), read_vision(QWEN2, TEXT_SIZE)
    patches = ImageInput(pixels=torch.randn(QWEN2_SIDE**2, 3 * 2 * 14 * 14), grid=(QWEN2_SIDE, QWEN2_SIDE))
    square = ImageInput(pixels=torch.randn(1, 3, 224, 224))
    return (
        Case(name="SigLIP-base, 224 pixels", config=siglip, image=square, num_tokens=196),
        Case(name="Qwen2-VL, 448 pixels, 4 layers", config=qwen2, image=patches, num_tokens=QWEN2_SIDE**2),
    )


def make_encoder(config: VisionTowerConfig, kernels: Kernels) -> ImageEncoder:
    """With small random weights."""
    torch.manual_seed(0)
    tensors = {}
    for parameter in vision_table(config):
        rows, *columns = parameter.shape
        tensors[parameter.name] = 0.02 * torch.randn(len(parameter.keys) * rows, *columns)
    return ImageEncoder(config, tensors, kernels)


def operations(case: Case) -> int:
    """Multiplications and additions for one image: every matrix once a token, and attention."""
    total = 0
    for parameter in vision_table(case.config):
        if parameter.name.endswith(".weight") and len(parameter.shape) > 1:
            is_merged = parameter.name.startswith("projector") and case.config.family == "qwen2_vl"
            tokens = case.num_tokens // 4 if is_merged else case.num_tokens
            total += 2 * tokens * math.prod(parameter.shape) * len(parameter.keys)
    layers = case.config.tower.num_layers
    return total + 4 * layers * case.num_tokens**2 * case.config.tower.block.hidden_size


def limit() -> float:
    """Operations a second of torch's product of two large matrices."""
    matrix = torch.randn(2048, 2048)
    return 2 * 2048**3 / best_seconds(lambda: matrix @ matrix)


def bench(case: Case, name: str, encoder: ImageEncoder, most: float) -> None:
    """One row of the table."""
    alone = best_seconds(lambda: encoder.encode([case.image]))
    together = best_seconds(lambda: encoder.encode([case.image] * BATCH)) / BATCH
    work = operations(case)
    print(
        f"{case.name:32} {name:9} alone {1 / alone:6.2f} images/s {work / alone / 1e9:6.1f} GFLOP/s "
        f"({work / alone / most:4.0%} of the limit), {BATCH} together {1 / together:6.2f} images/s "
        f"({work / together / most:4.0%})"
    )


def main() -> None:
    """Print the table."""
    cpu, most = torch.device("cpu"), limit()
    compiled, plain = (TowerKernels(load_ops(cpu, kernels)) for kernels in ("auto", "reference"))
    print(f"{torch.get_num_threads()} threads, limit {most / 1e9:.0f} GFLOP/s (torch, 2048 x 2048 x 2048)")
    for case in cases():
        for name, kernels in (("compiled", compiled), ("torch", plain)):
            bench(case, name, make_encoder(case.config, kernels), most)


if __name__ == "__main__":
    main()
