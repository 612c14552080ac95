"""A flag of the architecture that is wrong makes `align` fail and name the right layer and kind of operation."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from model_runtime.align.compare import Alignment
from model_runtime.align.product import Product
from model_runtime.architecture import Experts, ModelConfig
from model_runtime.blocks.attention import Attention
from model_runtime.blocks.moe import MixtureOfExperts
from model_runtime.models.layer import layer_stack
from model_runtime.ops.registry import Linear
from tests.align.cases import Aligned, Break, Flip

FAMILIES = ("gemma2", "granite", "glm", "glm4_moe", "qwen2_moe", "gpt_oss", "cohere2")


def config(**changes: object) -> Flip:
    return lambda config: replace(config, **changes)  # type: ignore[arg-type]


def rope(**changes: object) -> Flip:
    return lambda config: replace(config, rope=replace(config.rope, **changes))  # type: ignore[arg-type]


def experts(**changes: object) -> Flip:
    def flip(config: ModelConfig) -> ModelConfig:
        assert isinstance(config.experts, Experts)
        return replace(config, experts=replace(config.experts, **changes))  # type: ignore[arg-type]

    return flip


FLIPS: Mapping[str, tuple[str, Flip, int | None, str, str]] = {
    "rope base": ("gemma2", rope(theta=10000.0), 0, "rope", "rope base: 300 "),
    "rope factor": ("gemma2", rope(factor=2.0), 0, "rope", "scaling factor: 4 "),
    "rope kind": ("gemma2", rope(kind="linear"), 0, "rope", "yarn in the reference"),
    "rope attention factor": ("gemma2", rope(attention_factor=1.0), 0, "rope", "1.139"),
    "rope layout": ("glm", rope(interleaved=False), 0, "rope", "rotates neighbours"),
    "rotated channels": ("glm4_moe", rope(rotary_dim=16), 0, "rope", "rotated channels: 8"),
    "layers without rotation": ("cohere2", config(other_rope_layers=(False,) * 3), 1, "rope", "does not rotate"),
    "embedding scale": ("gemma2", config(embedding_scale=1.0), 0, "embedding", "embedding scale: 8"),
    "norm weights less one": ("gemma2", config(norm_weights_less_one=False), 0, "norm", "1 larger"),
    "norm epsilon": ("granite", config(rms_norm_eps=1e-6), 0, "norm", "about 1e-05"),
    "norm subtracts mean": ("cohere2", config(norm="rms"), 0, "norm", "subtracts the mean"),
    "attention scale": ("gemma2", config(attention_scale=0.0), 0, "attention", "attention scale: 0.223607"),
    "attention softcap": ("gemma2", config(attention_softcap=0.0), 0, "attention", "softcap: 1.0"),
    "window missing": ("gemma2", config(sliding_windows=(0, 0, 9)), 1, "attention", "window: 9"),
    "window one longer": ("gemma2", config(sliding_windows=(0, 9, 10)), 2, "attention", "window: 9"),
    "activation": ("gemma2", config(activation="silu"), 0, "activation", "gelu with tanh"),
    "residual multiplier": ("granite", config(residual_scale=1.0), 0, "residual", "0.3 times"),
    "logit scale": ("granite", config(logit_scale=1.0), None, "logits", "0.4 and none"),
    "logit softcap": ("gemma2", config(logit_softcap=0.0), None, "logits", "1 and 1"),
    "router renormalises": ("glm4_moe", experts(renormalise=False), 1, "routing", "divided by their sum"),
    "router scale": ("glm4_moe", experts(scale=1.0), 1, "routing", "scaled by 1.7"),
    "router scores": ("glm4_moe", experts(router="softmax"), 1, "routing", "made by sigmoid"),
    "groups of experts": ("glm4_moe", experts(num_groups=1), 1, "routing", "1 of 2 groups"),
    "clamp of experts": ("gpt_oss", experts(clamp=7.0), 0, "experts", "clamp of experts: 0.3"),
}
"""Family, change of its architecture, and what the report must name: layer, kind of operation, and why."""


def attention_of(product: Product, layer: int) -> Attention:
    attention = product.decoder.layers[layer].attention
    assert isinstance(attention, Attention)
    return attention


def mixture_of(product: Product, layer: int) -> MixtureOfExperts:
    mixture = product.decoder.layers[layer].mlp
    assert isinstance(mixture, MixtureOfExperts)
    return mixture


def drop_bias(product: Product) -> None:
    attention_of(product, 1).qkv = Linear(attention_of(product, 1).qkv.weight, None)


def drop_qk_norm(product: Product) -> None:
    attention_of(product, 1).norms = None


def drop_sinks(product: Product) -> None:
    attention_of(product, 1).scoring = replace(attention_of(product, 1).scoring, sinks_H=None)


def drop_choice_bias(product: Product) -> None:
    mixture_of(product, 2).choice_bias_N = None


def drop_shared(product: Product) -> None:
    mixture_of(product, 1).shared = None


def drop_shared_gate(product: Product) -> None:
    mixture_of(product, 1).shared_gate = None


def not_parallel(product: Product) -> None:
    product.decoder.layers[1].parallel = False


def drop_result_norm(product: Product) -> None:
    product.decoder.layers[2].mlp_result_norm_C = None


def tied(product: Product) -> None:
    """The embedding in place of the file's own output matrix."""
    product.decoder.config = replace(product.decoder.config, tie_word_embeddings=True)
    product.decoder.head = product.decoder.embedding


def transposed(product: Product) -> None:
    """The output projection's weight the other way round."""
    attention = attention_of(product, 1)
    weight = attention.output.weight
    plain = product.decoder.ops.linear(torch.eye(weight.num_columns), weight, None)
    packed = product.decoder.ops.pack(plain.contiguous())
    product.decoder.parameters.matrices["layers.1.attention.output.weight"] = packed
    attention.output = Linear(packed, attention.output.bias)


BREAKS: Mapping[str, tuple[str, Break, int, str, str]] = {
    "bias of queries, keys and values": ("glm", drop_bias, 1, "linear", "bias"),
    "norms of queries and keys": ("glm4_moe", drop_qk_norm, 1, "qk_norm", "norms of queries and keys are missing"),
    "sinks": ("gpt_oss", drop_sinks, 1, "attention", "sinks are missing"),
    "bias of the choice of experts": ("glm4_moe", drop_choice_bias, 2, "routing", "with a bias"),
    "shared block": ("glm4_moe", drop_shared, 1, "experts", "shared block"),
    "gate of the shared block": ("qwen2_moe", drop_shared_gate, 1, "experts", "gate of the shared block"),
    "blocks side by side": ("cohere2", not_parallel, 1, "residual", "blocks side by side"),
    "norm of a result": ("gemma2", drop_result_norm, 2, "norm", "never applies"),
    "tied output matrix": ("gemma2", tied, None, "linear", "tied embeddings"),
    "transposed projection": ("granite", transposed, 1, "linear", "transposed"),
}
"""The same of what the loader would refuse, done to the loaded decoder."""


def assert_named(found: Alignment, layer: int | None, kind: str, words: str) -> None:
    assert not found.passed
    assert found.first is not None
    assert (found.first.layer, found.first.kind) == (layer, kind), found.first
    assert len(found.suspects) == 1 and words in found.suspects[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_flipped(checkpoint: Callable[[str], Aligned], family: str) -> None:
    found = checkpoint(family).compared()
    assert found.passed and found.unobserved == ()
    assert {"linear", "norm", "rope", "attention", "residual"} <= {place.kind for place in found.places}


@pytest.mark.parametrize("name", FLIPS)
def test_flipped(checkpoint: Callable[[str], Aligned], name: str) -> None:
    family, flip, layer, kind, words = FLIPS[name]
    assert_named(checkpoint(family).compared(flip), layer, kind, words)


@pytest.mark.parametrize("name", BREAKS)
def test_broken(checkpoint: Callable[[str], Aligned], name: str) -> None:
    family, broken, layer, kind, words = BREAKS[name]
    assert_named(checkpoint(family).compared(broken=broken), layer, kind, words)


def test_the_compiled_program_is_wrong(checkpoint: Callable[[str], Aligned]) -> None:
    """Operation by operation the product is right, and what serves is not."""

    def broken(product: Product) -> None:
        decoder = product.decoder
        other = [decoder.layers[0], *decoder.layers[:-1]]
        decoder.stack = layer_stack(decoder.ops, other, decoder.collectives)

    found = checkpoint("granite").compared(broken=broken)
    assert not found.passed and found.first is None
    assert found.same_path > found.logits_limit


@pytest.mark.parametrize("family", ["gemma2", "qwen2_moe", "gpt_oss", "glm"])
def test_two_ranks(checkpoint: Callable[[str], Aligned], family: str) -> None:
    aligned = checkpoint(family)
    found = aligned.compared(ranks=2)
    assert found.passed
    assert all(place.endswith(("down_proj.out", "o_proj.out", "mlp.out")) for place in found.unobserved)
    broken = aligned.compared(rope(theta=777.0), ranks=2)
    assert_named(broken, 0, "rope", "with one rank")


def test_the_second_rank_is_wrong(checkpoint: Callable[[str], Aligned]) -> None:
    found = checkpoint("glm").compared(broken=drop_bias, ranks=2)
    assert_named(found, 1, "linear", "with one rank")
    assert found.first is not None and found.first.place == "layers.1.self_attn.q_proj.out"
