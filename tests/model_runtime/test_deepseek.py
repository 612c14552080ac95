"""DeepSeek-V3, the language model of Kimi K2.5: logits equal transformers' through the paged path, and no token's
numbers depend on what else is computed."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_runtime.checkpoint import LoadedModel, load_model
from model_runtime.ops import load_ops, set_threads
from model_runtime.ops.registry import select
from model_runtime.parallel import Alone, Collectives, tensor_mesh
from model_runtime.weights.errors import CheckpointError
from tests.checkpoints import VOCAB_SIZE
from tests.model_runtime.deepseek import YARN, make_model
from tests.model_runtime.memory import assert_activations_as_planned
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.quantized_checkpoints import fp8_blocks
from tests.model_runtime.ranks import on_shared_memory
from tests.vlm import make_vlm
from vision.encoder.model import ImageInput

TOLERANCE = 1e-4
LENGTHS = (41, 1, 18)
CASES: dict[str, dict[str, object]] = {
    "plain": {},
    "queries-at-once": {"q_lora_rank": None},
    "biases-tied": {"attention_bias": True, "tie_word_embeddings": True},
    "yarn": {"rope_parameters": YARN},
    "halves-rotated": {"rope_interleave": False, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "kimi": {"n_group": 1, "topk_group": 1, "n_routed_experts": 10, "n_shared_experts": 2, "num_experts_per_tok": 4},
    "weights-as-they-are": {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "experts-everywhere": {"first_k_dense_replace": 0, "qk_nope_head_dim": 8, "v_head_dim": 16},
}


def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = random.Random(1)
    return [[generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class Aligned:
    """A checkpoint on disk, some prompts, and what transformers makes of them."""

    folder: Path
    prompts: list[list[int]]
    expected: list[Tensor]

    def load(self, kernels: str) -> LoadedModel:
        return load_model(self.folder, load_ops(DEVICE, kernels), DEVICE, lambda fraction: None)


@pytest.fixture(scope="module", params=CASES)
def aligned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Aligned:
    folder = tmp_path_factory.mktemp(request.param)
    model, prompts = make_model(CASES[request.param]), prompts_of(LENGTHS)
    model.save_pretrained(folder)
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
    return Aligned(folder, prompts, expected)


def assert_equal(logits: Tensor, expected: Tensor) -> None:
    assert (logits - expected).abs().max().item() <= TOLERANCE
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert expected.std().item() > 0.5


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_whole_prompts_one_by_one(aligned: Aligned, kernels: str) -> None:
    run = PagedRun(aligned.load(kernels).decoder)
    for index, prompt in enumerate(aligned.prompts):
        assert_equal(run.step({index: prompt})[index], aligned.expected[index])


def test_narrow_activations(aligned: Aligned) -> None:
    """As on a GPU, whose operations work here too. Where two experts are as good, a token may get the other."""
    decoder = load_model(aligned.folder, select("cuda"), DEVICE, lambda fraction: None).decoder
    decoder.dtype = torch.float16
    found = PagedRun(decoder).step(dict(enumerate(aligned.prompts)))
    for index, expected in enumerate(aligned.expected):
        error = (found[index] - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.median() <= 0.02


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_ragged_batch_in_chunks_then_token_by_token(aligned: Aligned, kernels: str) -> None:
    """Chunks of 7, sequences of different lengths side by side, blocks of 4 in random order; the last 9 tokens of the
    first prompt come one by one."""
    run = PagedRun(aligned.load(kernels).decoder, block_size=4)
    long, short, middle = aligned.prompts
    steps = [{0: long[:7], 1: short}, *({0: long[at : at + 7], 2: middle[at - 7 : at]} for at in (7, 14, 21))]
    steps += [{0: long[28:32]}, *({0: [token]} for token in long[32:])]
    got: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    for step in steps:
        for index, logits in run.step({key: tokens for key, tokens in step.items() if tokens}).items():
            got[index].append(logits)
    for index, expected in enumerate(aligned.expected):
        assert_equal(torch.cat(got[index]), expected)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    set_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_sequence_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    """Bit for bit: alone and whole, or in chunks of 1, 5 and 64 beside others, by one thread or two."""
    make_model({}).save_pretrained(tmp_path)
    decoder = load_model(tmp_path, load_ops(DEVICE, "auto"), DEVICE, lambda fraction: None).decoder
    prompts = prompts_of((1, 2, 3, 5, 8, 13, 21, 34, 40, 40))
    alone = [PagedRun(decoder).step({0: prompt})[0] for prompt in prompts]
    for chunk, count in ((1, 1), (5, 2), (64, 2)):
        set_threads(count)
        run, got = PagedRun(decoder, block_size=4, num_blocks=256), [torch.empty(0, VOCAB_SIZE) for _ in prompts]
        order = random.Random(chunk).sample(range(len(prompts)), len(prompts))
        while step := {index: rest[:chunk] for index in order if (rest := prompts[index][len(got[index]) :])}:
            for index, logits in run.step(step).items():
                got[index] = torch.cat((got[index], logits))
        for index, expected in enumerate(alone):
            assert torch.equal(got[index], expected), f"prompt {index} in chunks of {chunk}"


def rewrite(folder: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))


def test_layers_for_drafts_are_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3's files have a layer after the last one; as many as the config says are no mistake, one more is."""
    make_model({}).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    last = {key: tensor for key, tensor in tensors.items() if key.startswith("model.layers.2.")}
    drafts = {key.replace(".2.", f".{at}.", 1): tensor.clone() for at in (3, 4) for key, tensor in last.items()}
    rewrite(tmp_path, tensors | drafts, {"num_nextn_predict_layers": 2})
    expected_bytes = sum(tensor.numel() * 4 for tensor in tensors.values())
    loaded = load_model(tmp_path, load_ops(DEVICE, "reference"), DEVICE, lambda fraction: None)
    assert loaded.weight_bytes == expected_bytes
    rewrite(tmp_path, tensors | drafts, {"num_nextn_predict_layers": 1})
    with pytest.raises(CheckpointError, match=r"unused are model\.layers\.4\."):
        load_model(tmp_path, load_ops(DEVICE, "reference"), DEVICE, lambda fraction: None)


def test_attention_in_fp8(tmp_path: Path) -> None:
    """As DeepSeek-V3 is published: the matrix that is taken apart by heads too, whose blocks of scales begin anywhere
    in a head; on one rank and on two."""
    model, (prompt,) = make_model({"kv_lora_rank": 32, "q_lora_rank": 32}), prompts_of((60,))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "self_attn" in name:
            stored, expanded = fp8_blocks(module.weight.detach(), (16, 16))
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{ending}": tensor.contiguous() for ending, tensor in stored.items()}
            module.weight.data.copy_(expanded)
    how = {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head", "mlp"]}
    rewrite(tmp_path, tensors, {"quantization_config": how})
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]

    def logits(collectives: Collectives) -> Tensor:
        ops = load_ops(DEVICE, "auto")
        decoder = load_model(tmp_path, ops, DEVICE, lambda fraction: None, mesh=tensor_mesh(collectives)).decoder
        return PagedRun(decoder).step({0: prompt})[0]

    for found in (logits(Alone()), on_shared_memory(2, logits)[0]):
        error = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert error.median() <= 2e-3


@pytest.mark.parametrize("published", [False, True])
def test_kimi_in_both_spellings(tmp_path: Path, published: bool) -> None:
    """Text alone through the whole checkpoint, as transformers writes it and as Moonshot publishes it."""
    model = make_vlm(tmp_path, "kimi_k25")
    prompt = [[token % 256 for token in prompts_of((30,))[0]]]
    with torch.inference_mode():
        expected = model(torch.tensor(prompt)).logits[0]
    if published:
        tensors = load_file(tmp_path / "model.safetensors")
        names = {"model.mm_projector.": "mm_projector.", "language_model.model.blocks.": "language_model.model.layers."}
        names |= {"vision_tower.encoder.patch_embed.": "vision_tower.patch_embed."}
        for old, new in names.items():
            assert any(key.startswith(old) for key in tensors)
            tensors = {key.replace(old, new, 1): tensor for key, tensor in tensors.items()}
        text = json.loads((tmp_path / "config.json").read_text())["text_config"]
        rewrite(tmp_path, tensors, {"text_config": text | {"model_type": "kimi_k2"}})
    for kernels in ("auto", "reference"):
        loaded = load_model(tmp_path, load_ops(DEVICE, kernels), DEVICE, lambda fraction: None)
        assert loaded.vision is not None
        assert_equal(PagedRun(loaded.decoder).step({0: prompt[0]})[0], expected)


def test_kimi_vl_is_kimi_under_other_names(tmp_path: Path) -> None:
    """transformers does not have Kimi-VL; for single images it is the same model, apart from names and sizes."""
    model = make_vlm(tmp_path, "kimi_k25")
    same = load_model(tmp_path, load_ops(DEVICE, "auto"), DEVICE, lambda fraction: None)
    names = {"model.mm_projector.pre_norm.": "multi_modal_projector.pre_norm."}
    names |= {"mm_projector.proj.0.": "multi_modal_projector.linear_1."}
    names |= {"mm_projector.proj.2.": "multi_modal_projector.linear_2."}
    names |= {"language_model.model.blocks.": "language_model.model.layers."}
    tensors = load_file(tmp_path / "model.safetensors")
    for old, new in names.items():
        assert any(key.startswith(old) for key in tensors)
        tensors = {key.replace(old, new, 1): tensor for key, tensor in tensors.items()}
    vision = json.loads((tmp_path / "config.json").read_text())["vision_config"]
    vision |= {f"init_{key}": vision.pop(key) for key in ("pos_emb_height", "pos_emb_width")}
    vision |= {"model_type": "moonvit"}
    token = {"media_placeholder_token_id": model.config.image_token_id, "image_token_id": None}
    rewrite(tmp_path, tensors, {"model_type": "kimi_vl", "vision_config": vision} | token)
    processor = {"image_processor_type": "KimiVLImageProcessor", "patch_size": 4, "pad_input": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    found = load_model(tmp_path, load_ops(DEVICE, "auto"), DEVICE, lambda fraction: None)
    assert found.description.startswith("kimi_vl (deepseek_v3), ")
    assert found.vision is not None and same.vision is not None
    image = ImageInput(pixels=torch.randn(24, 48, generator=torch.Generator().manual_seed(6)), grid=(4, 6))
    made, expected = (side.encoder.encode([image])[0].embeddings_NO for side in (found.vision, same.vision))
    assert torch.equal(made, expected) and made.shape == (6, 64)
    prompt = [token % 256 for token in prompts_of((30,))[0]]
    logits, expected = (PagedRun(loaded.decoder).step({0: prompt})[0] for loaded in (found, same))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    "overrides",
    [
        {"q_lora_rank": 512, "v_head_dim": 8},
        {"kv_lora_rank": 256, "v_head_dim": 24},
        {"moe_intermediate_size": 512, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4},
    ],
)
def test_activations_are_as_planned(tmp_path: Path, overrides: dict[str, object]) -> None:
    """Short vectors, queries and mixed latents, or an expert that all tokens choose."""
    make_model(overrides).save_pretrained(tmp_path)
    decoder = load_model(tmp_path, load_ops(DEVICE, "auto"), DEVICE, lambda fraction: None).decoder
    assert_activations_as_planned(decoder, prompts_of((200,))[0])
