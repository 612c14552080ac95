"""Logits equal transformers' on the same weights, through the paged path: tiny checkpoints of every family, and the
embedded SmolLM2."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_runtime.checkpoint import load_model
from model_runtime.models.decoder import Decoder
from model_runtime.ops import load_ops
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.model_runtime.paged import DEVICE, PagedRun

TOLERANCE = 1e-4
LENGTHS = (41, 1, 18)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-gqa": ("llama", {}),
    "llama-mqa-wide-head": ("llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-yarn-rope": ("llama", {"rope_parameters": YARN_ROPE}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-dynamic-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@dataclass(frozen=True)
class Aligned:
    """A checkpoint on disk, some prompts, and what transformers makes of them."""

    folder: Path
    prompts: list[list[int]]
    expected: list[Tensor]

    def decoder(self, kernels: str) -> Decoder:
        return load_model(self.folder, load_ops(DEVICE, kernels), DEVICE, lambda fraction: None).decoder


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def reference_logits(model: torch.nn.Module, prompts: list[list[int]]) -> list[Tensor]:
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).logits[0].float() for prompt in prompts]


@pytest.fixture(scope="module", params=CASES)
def aligned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Aligned:
    family, overrides = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(folder, family, overrides)
    prompts = random_prompts(LENGTHS)
    return Aligned(folder, prompts, reference_logits(model, prompts))


def assert_equal(logits: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(logits).all()
    assert (logits - expected).abs().max().item() <= TOLERANCE
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def chunks(tokens: list[int], size: int) -> Iterator[list[int]]:
    return (tokens[start : start + size] for start in range(0, len(tokens), size))


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_whole_prompts_one_by_one(aligned: Aligned, kernels: str) -> None:
    run = PagedRun(aligned.decoder(kernels))
    for index, prompt in enumerate(aligned.prompts):
        assert_equal(run.step({index: prompt})[index], aligned.expected[index])


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_ragged_batch_in_chunks(aligned: Aligned, kernels: str) -> None:
    """Chunks of 7, sequences of different lengths side by side, blocks of 4 in random order."""
    run = PagedRun(aligned.decoder(kernels), block_size=4)
    streams = {index: chunks(prompt, 7) for index, prompt in enumerate(aligned.prompts)}
    got: dict[int, list[Tensor]] = {index: [] for index in streams}
    while step := {index: chunk for index, stream in streams.items() if (chunk := next(stream, None))}:
        for index, logits in run.step(step).items():
            got[index].append(logits)
    for index, expected in enumerate(aligned.expected):
        assert_equal(torch.cat(got[index]), expected)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_decode_after_prefill(aligned: Aligned, kernels: str) -> None:
    """One token a step for the first sequence, while another one's prompt is computed beside it."""
    run = PagedRun(aligned.decoder(kernels))
    prompt, other = aligned.prompts[0], chunks(aligned.prompts[2], 5)
    got = [run.step({0: prompt[:9]})[0]]
    for token in prompt[9:]:
        neighbour = next(other, None)
        got.append(run.step({0: [token]} | ({2: neighbour} if neighbour else {}))[0])
    assert_equal(torch.cat(got), aligned.expected[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_storage_is_kept_and_computed_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    make_checkpoint(tmp_path, "llama", {"tie_word_embeddings": True}, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompts = random_prompts((23,))
    loaded = load_model(tmp_path, load_ops(DEVICE, "reference"), DEVICE, lambda fraction: None)
    assert_equal(PagedRun(loaded.decoder).step({0: prompts[0]})[0], reference_logits(model, prompts)[0])
    numbers = sum(parameter.numel() for parameter in model.parameters())
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    assert loaded.weight_bytes == 2 * (numbers - vectors) + 4 * vectors
