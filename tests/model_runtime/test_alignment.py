"""Logits equal transformers' on the same weights, through the paged path: tiny checkpoints of every family, also the
language models of vision-language ones, and the embedded SmolLM2."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from model_runtime.batch import ImageRows, make_batch
from model_runtime.checkpoint import load_model
from model_runtime.models.decoder import Decoder
from model_runtime.ops import load_ops
from scheduler.plan import ints
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.vlm import make_vlm

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
    "gemma3": ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "gemma3-ropes": (
        "gemma3_text",
        {
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma3-untied-biases": ("gemma3_text", {"tie_word_embeddings": False, "attention_bias": True}),
}
VISION_CASES: dict[str, tuple[str, dict[str, object]]] = {
    "vision llama, tied": ("idefics3-whole", {}),
    "vision mistral, window": ("llava_next", {}),
    "vision qwen2": ("internvl", {}),
    "vision qwen3": ("llava-clip", {"model_type": "qwen3"}),
    "vision ministral3": (
        "mistral3",
        {"model_type": "ministral3", "rope_parameters": {**YARN_ROPE, "llama_4_scaling_beta": 0.5}},
    ),
    "vision gemma3": ("gemma3", {}),
    "vision qwen2_vl": ("qwen2_vl", {}),
    "vision qwen2_vl, window": (
        "qwen2_vl",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "vision qwen2_5_vl, yarn": ("qwen2_5_vl", {"rope_parameters": {**YARN_ROPE, "mrope_section": [2, 3, 3]}}),
    "vision qwen3_vl, biases": ("qwen3_vl", {"attention_bias": True}),
}
"""Of `tests/vlm.py`, with changes to the language model, asked without images."""


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


@pytest.fixture(scope="module", params=[*CASES, *VISION_CASES])
def aligned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Aligned:
    folder, prompts = tmp_path_factory.mktemp("checkpoint"), random_prompts(LENGTHS)
    if request.param in CASES:
        model = make_checkpoint(folder, *CASES[request.param])
    else:
        model = make_vlm(folder, *VISION_CASES[request.param])
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


IMAGE = slice(7, 19)
"""Rows of a prompt that are an image of 3 rows and 4 columns."""


def image_positions(length: int) -> Tensor:
    """[3, length]: M-RoPE positions with that image (arXiv 2409.12191): text goes on after its longer side."""
    rows, columns = torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")
    image_3N = IMAGE.start + torch.stack([torch.zeros(12, dtype=torch.int64), rows.flatten(), columns.flatten()])
    after = torch.arange(length - IMAGE.stop) + IMAGE.start + 4
    return torch.cat([torch.arange(IMAGE.start).expand(3, -1), image_3N, after.expand(3, -1)], dim=1)


def step_with_image(
    run: PagedRun, tokens: list[int], rows: slice, image: ImageRows, positions_3L: Tensor | None
) -> Tensor:
    """Logits of these rows of the prompt, computed in one step, with what falls into the image taken from it."""
    first, last = max(rows.start, IMAGE.start), min(rows.stop, IMAGE.stop)
    part = slice(first - IMAGE.start, last - IMAGE.start)
    cut = ImageRows(
        start=first - rows.start,
        embeddings_NC=image.embeddings_NC[part],
        deepstack_NC=tuple(level_NC[part] for level_NC in image.deepstack_NC),
    )
    plan = run.plan({0: tokens[rows]})
    if positions_3L is not None:
        plan = replace(plan, rope_positions=ints(positions_3L[:, rows].T.flatten().tolist()))
    batch = make_batch(plan, run.block_size, images=(cut,) if first < last else ())
    with torch.inference_mode():
        return run.decoder.logits(run.decoder.forward(batch, run.kv))


@pytest.mark.parametrize("name", ["llava-clip", "gemma3", "qwen2_vl", "qwen3_vl"])
def test_image_rows_rotations_and_deepstack(name: str, tmp_path: Path) -> None:
    """Causally, as without the pictures' own attention; whole, and in chunks of which one ends inside the image."""
    model = make_vlm(tmp_path, name)
    (tokens,) = random_prompts((31,))
    generator = torch.Generator().manual_seed(2)
    levels = [torch.randn(12, 64, generator=generator) for _ in range(3 if name == "qwen3_vl" else 1)]
    image = ImageRows(start=0, embeddings_NC=levels[0], deepstack_NC=tuple(levels[1:]))
    positions_3L = image_positions(31) if "qwen" in name else None
    extra: dict[str, object] = {} if positions_3L is None else {"position_ids": positions_3L[:, None]}
    if levels[1:]:
        is_image_1L = torch.zeros(1, 31, dtype=torch.bool)
        is_image_1L[:, IMAGE] = True
        extra |= {"visual_pos_masks": is_image_1L, "deepstack_visual_embeds": levels[1:]}
    language = model.model.language_model
    with torch.inference_mode():
        embedded = language.embed_tokens(torch.tensor([tokens]))
        embedded[:, IMAGE] = levels[0]
        expected = model.lm_head(language(inputs_embeds=embedded, **extra).last_hidden_state)[0]
    decoder = load_model(tmp_path, load_ops(DEVICE, "auto"), DEVICE, lambda fraction: None).decoder
    for cuts in ((0, 31), (0, 3, 11, 12, 31)):
        run = PagedRun(decoder, block_size=4)
        parts = [slice(*pair) for pair in pairwise(cuts)]
        assert_equal(torch.cat([step_with_image(run, tokens, part, image, positions_3L) for part in parts]), expected)


def test_equal_rope_positions_give_the_same_bits(tmp_path: Path) -> None:
    """A step with a table of its own computes for text what one with the static table does."""
    make_vlm(tmp_path, "qwen3_vl")
    decoder = load_model(tmp_path, load_ops(DEVICE, "auto"), DEVICE, lambda fraction: None).decoder
    (tokens,) = random_prompts((31,))
    static, own = PagedRun(decoder), PagedRun(decoder)
    plan = replace(own.plan({0: tokens}), rope_positions=ints([p for p in range(31) for _ in range(3)]))
    with torch.inference_mode():
        logits = decoder.logits(decoder.forward(make_batch(plan, own.block_size), own.kv))
    assert torch.equal(logits, static.step({0: tokens})[0])


def test_a_model_without_m_rope_takes_no_rope_positions(tmp_path: Path) -> None:
    make_vlm(tmp_path, "llava-clip")
    decoder = load_model(tmp_path, load_ops(DEVICE, "auto"), DEVICE, lambda fraction: None).decoder
    run = PagedRun(decoder)
    plan = replace(run.plan({0: [3, 4]}), rope_positions=ints([0, 0, 0, 1, 1, 1]))
    with pytest.raises(AssertionError, match="turns by the position alone"):
        decoder.forward(make_batch(plan, run.block_size), run.kv)
