"""Ranks that share every layer compute what one computes alone, and the numbers of a text depend on nothing else."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_runtime.blocks.moe import MixtureOfExperts
from model_runtime.checkpoint import load_model
from model_runtime.models.decoder import Decoder
from model_runtime.ops import load_ops
from model_runtime.parallel import Alone, Collectives, tensor_mesh
from tests.checkpoints import make_checkpoint
from tests.family_cases import DRAWS, make_random_model
from tests.model_runtime import deepseek
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.ranks import on_threads

TOLERANCE = 1e-4
UNEVEN = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
CUT_GROUP = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}
"""The middle one of three groups, by two ranks."""
BIASES = {"attention_bias": True, "mlp_bias": True}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "tied, all heads their own": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "uneven": ("llama", UNEVEN),
    "a cut group": ("llama", CUT_GROUP | BIASES),
    "biases, one key/value head": ("llama", {"num_key_value_heads": 1} | BIASES),
    "qwen3": ("qwen3", {"attention_bias": True}),
    "gemma 3": ("gemma3_text", {"sliding_window": 9, "num_key_value_heads": 4}),
    "olmo 2": ("olmo2", {}),
    "gpt-oss": ("gpt_oss", {}),
    "llama 4": ("llama4_text", {}),
    "mimo": ("mimo_v2_flash", {}),
    "deepseek": ("deepseek", {}),
    "deepseek, biases": ("deepseek", {"attention_bias": True, "q_lora_rank": None, "moe_intermediate_size": 32}),
}
TEXTS = {
    index: [(7 * index + 13 * place) % 256 + 3 for place in range(length)] for index, length in enumerate((37, 4, 20))
}
NEXT = 3
"""Tokens at the end of each text that have steps of their own."""


def make(folder: Path, name: str) -> None:
    family, overrides = CASES[name]
    if family == "deepseek":
        deepseek.make_model(overrides).save_pretrained(folder)
    elif family in DRAWS:
        make_random_model(folder, family, seed=0)
    else:
        make_checkpoint(folder, family, overrides)


def load(folder: Path, kernels: str, collectives: Collectives, *, whole_experts: bool = False) -> Decoder:
    ops, mesh = load_ops(DEVICE, kernels), tensor_mesh(collectives)
    return load_model(folder, ops, DEVICE, lambda done: None, mesh=mesh, whole_experts=whole_experts).decoder


def logits(decoder: Decoder, texts: dict[int, list[int]]) -> dict[int, Tensor]:
    """[tokens, V] of each text: first parts together, then token by token."""
    run = PagedRun(decoder)
    steps = [{index: text[:-NEXT] for index, text in texts.items()}]
    steps += [{index: [text[-left]] for index, text in texts.items()} for left in range(NEXT, 0, -1)]
    parts = [run.step(step) for step in steps]
    return {index: torch.cat([part[index] for part in parts]) for index in texts}


def on_ranks(folder: Path, kernels: str, size: int, texts: dict[int, list[int]] = TEXTS) -> dict[int, Tensor]:
    return on_threads(size, lambda collectives: logits(load(folder, kernels, collectives), texts))[0]


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in CASES), ("uneven", 3), ("deepseek", 3)])
def test_logits_are_those_of_one_rank(tmp_path: Path, name: str, size: int) -> None:
    make(tmp_path, name)
    expected, found = logits(load(tmp_path, "reference", Alone()), TEXTS), on_ranks(tmp_path, "reference", size)
    for index, text in TEXTS.items():
        assert found[index].shape == expected[index].shape == (len(text), 259)
        assert (found[index] - expected[index]).abs().max().item() <= TOLERANCE
        assert torch.equal(found[index].argmax(-1), expected[index].argmax(-1))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_may_have_whole_experts(tmp_path: Path, size: int) -> None:
    make(tmp_path, "deepseek")
    expected = logits(load(tmp_path, "auto", Alone()), TEXTS)

    def one(collectives: Collectives) -> tuple[dict[int, Tensor], int]:
        decoder = load(tmp_path, "auto", collectives, whole_experts=True)
        mixtures = [layer.mlp for layer in decoder.layers[1:]]
        assert all(isinstance(mlp, MixtureOfExperts) and len(mlp.experts) == 12 // size for mlp in mixtures)
        return logits(decoder, TEXTS), decoder.expert_tokens()

    results = on_threads(size, one)
    found, loads = results[0][0], [tokens for _, tokens in results]
    assert min(loads) > 0 and sum(loads) == 2 * deepseek.EXPERTS.num_chosen * sum(map(len, TEXTS.values()))
    for index, text in TEXTS.items():
        assert found[index].shape == (len(text), 259)
        assert (found[index] - expected[index]).abs().max().item() <= TOLERANCE
        assert torch.equal(found[index].argmax(-1), expected[index].argmax(-1))


@pytest.mark.parametrize("name", ["uneven", "a cut group", "deepseek", "olmo 2"])
def test_a_text_is_the_same_alone_and_beside_others(tmp_path: Path, name: str) -> None:
    """Bit for bit, and at every run: sums have an order."""
    make(tmp_path, name)
    together = on_ranks(tmp_path, "auto", 2)
    for index, text in TEXTS.items():
        assert torch.equal(on_ranks(tmp_path, "auto", 2, {index: text})[index], together[index])


class First(Alone):
    """Rank 0 of two, without the other."""

    size = 2


class Last(First):
    rank = 1


def test_a_token_outside_the_vocabulary_is_a_broken_invariant(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    for rank, token in ((First(), -1), (Last(), 259)):
        with pytest.raises(AssertionError, match=r"a token id is outside 0 \.\. 1"):
            PagedRun(load(tmp_path, "auto", rank)).step({0: [5, token]})
