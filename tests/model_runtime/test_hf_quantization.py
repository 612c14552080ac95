"""What a quantization_config says of each module, and what is refused by name."""

import pytest

from model_runtime.hf.quantization import read_quantization
from model_runtime.matrix_scheme import MatrixScheme
from model_runtime.weights.errors import CheckpointError

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 64]}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None, "output_activations": None}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head", "re:.*mlp\\.gate$"],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


def scheme(config: dict[str, object], module: str = "model.layers.0.mlp.up_proj") -> MatrixScheme | None:
    read = read_quantization({"quantization_config": config})
    assert read is not None
    return read.of(module)


def test_methods() -> None:
    assert scheme(FP8) == MatrixScheme(layout="fp8", bits=8, block=(128, 64))
    assert scheme(COMPRESSED) == MatrixScheme(layout="packed", bits=4, block=(1, 128))
    assert scheme(GPTQ) == MatrixScheme(layout="gptq", bits=4, block=(1, 0), zero_offset=1)
    second = GPTQ | {"checkpoint_format": "gptq_v2", "sym": False, "bits": 8, "group_size": 32}
    assert scheme(second) == MatrixScheme(layout="gptq", bits=8, block=(1, 32), symmetric=False)
    experts = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    assert scheme(experts) is None
    expected = MatrixScheme(layout="mxfp4", bits=4, block=(1, 32))
    assert scheme(experts, "model.layers.0.mlp.experts.3.down_proj") == expected
    assert scheme(AWQ) == MatrixScheme(layout="awq", bits=4, block=(1, 64), symmetric=False)


def test_models_without() -> None:
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None, "text_config": {}}) is None
    inner = read_quantization({"text_config": {"quantization_config": FP8}})
    assert inner is not None and inner.of("x") is not None


@pytest.mark.parametrize(
    ("module", "is_ignored"),
    [
        ("lm_head", True),
        ("model.language_model.lm_head", True),
        ("model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.gate_proj", False),
        ("model.lm_head_2", False),
    ],
)
def test_ignored_modules(module: str, is_ignored: bool) -> None:
    assert (scheme(COMPRESSED, module) is None) == is_ignored


def test_a_group_with_names_comes_before_the_one_of_all() -> None:
    eight = GROUP | {"targets": ["re:.*down_proj$"], "weights": WEIGHTS | {"num_bits": 8}}
    both = COMPRESSED | {"config_groups": {"group_0": GROUP, "group_1": eight}}
    for name, bits in (("up_proj", 4), ("down_proj", 8)):
        found = scheme(both, f"model.layers.3.mlp.{name}")
        assert found is not None and found.bits == bits


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "quantization_config.quant_method must be one of mxfp4, fp8, compressed-tensors, awq, gptq, not None"),
        ([1], "quantization_config must be an object"),
        (FP8 | {"fmt": "e5m2"}, "quantization_config.fmt must be 'e4m3'"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size must be two positive numbers"),
        (FP8 | {"rotation": "hadamard"}, "quantization_config.rotation ('hadamard') is not known"),
        (FP8 | {"ignored_layers": [1]}, "ignored_layers must be a list of names"),
        (AWQ | {"version": "gemv"}, "quantization_config.version must be 'gemm'"),
        (AWQ | {"bits": 3}, "quantization_config.bits must be 4"),
        (AWQ | {"zero_point": False}, "quantization_config.zero_point must be True"),
        (AWQ | {"group_size": 0}, "group_size must be a positive integer"),
        (GPTQ | {"bits": 3}, "quantization_config.bits must be 4 or 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "quantization_config.checkpoint_format must be"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "quantization_config.dynamic must be None or {}"),
        (COMPRESSED | {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized of int, 4 bits; supported are"),
        (COMPRESSED | {"transform_config": {"a": 1}}, "quantization_config.transform_config must be None or {}"),
        (COMPRESSED | {"sparsity_config": {"a": 1}}, "quantization_config.sparsity_config must be None or {}"),
        (COMPRESSED | {"ignore": ["re:("]}, "must be a pattern"),
        (
            COMPRESSED | {"config_groups": {"g": GROUP | {"weights": WEIGHTS | {"strategy": "token"}}}},
            "quantization_config.config_groups.g.weights.strategy must be",
        ),
        (
            COMPRESSED | {"config_groups": {"g": GROUP | {"weights": WEIGHTS | {"num_bits": 2}}}},
            "quantization_config.config_groups.g.weights.num_bits must be 4 or 8, not 2",
        ),
    ],
)
def test_refusals_name_the_key(config: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_quantization({"quantization_config": config})
    assert words in str(caught.value)
