"""DeepSeek-V3, the language model of Kimi K2.5: logits equal transformers' through the paged path, and no token's
numbers depend on what else is computed."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from model_runtime.batch import make_batch
from model_runtime.blocks.moe import route
from model_runtime.checkpoint import LoadedModel, load_model
from model_runtime.config import Experts, LatentAttention
from model_runtime.hf_config import read_hf_config
from model_runtime.memory import activation_bytes
from model_runtime.ops import load_ops, set_threads
from model_runtime.ops.registry import select
from model_runtime.weights.errors import CheckpointError
from tests.checkpoints import VOCAB_SIZE
from tests.model_runtime.memory import measured_bytes
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.vlm import make_vlm
from vision.encoder.model import ImageInput

TOLERANCE = 1e-4
LENGTHS = (41, 1, 18)
SMALL: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 12,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
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


def make_model(overrides: dict[str, object]) -> DeepseekV3ForCausalLM:
    """float32, with weights wide enough that logits and scores differ clearly, and a bias that changes the choice."""
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**(SMALL | overrides))).eval()
    generator = torch.Generator().manual_seed(0)
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
    assert biases
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *biases]:
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return model


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
    """The largest sum of living tensors in a step is what memory was planned for, within 10 %: queries, keys and
    values, or an expert that all tokens choose."""
    make_model(overrides).save_pretrained(tmp_path)
    decoder = load_model(tmp_path, load_ops(DEVICE, "auto"), DEVICE, lambda fraction: None).decoder
    (prompt,), run = prompts_of((200,)), PagedRun(decoder)
    batch = make_batch(run.plan({0: prompt}), run.block_size)
    with torch.inference_mode():
        peak, _ = measured_bytes(lambda: decoder.forward(batch, run.kv))
    assert peak == pytest.approx(activation_bytes(decoder.config, 200, 0), rel=0.1)


EXPERTS = Experts(
    first_layer=0,
    num_experts=12,
    num_chosen=3,
    num_groups=4,
    num_chosen_groups=2,
    intermediate_size=8,
    shared_size=8,
    renormalise=True,
    scale=1.7,
)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_router_chooses_and_weighs_as_transformers(kernels: str) -> None:
    router = DeepseekV3TopkRouter(DeepseekV3Config(**(SMALL | {"hidden_size": 12}))).eval()
    router.weight.data = torch.eye(12)
    router.e_score_correction_bias.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    logits_TN = torch.randn(500, 12, generator=torch.Generator().manual_seed(3)) * 3
    logits_TN[0], logits_TN[1, :6] = 0.0, -200.0
    _, expected_TK, chosen_TK = router(logits_TN)
    found = route(load_ops(DEVICE, kernels), logits_TN, router.e_score_correction_bias, EXPERTS)
    order_TK = chosen_TK.argsort(dim=-1)
    assert torch.equal(found.expert_TK, chosen_TK.gather(1, order_TK))
    torch.testing.assert_close(found.weight_TK, expected_TK.gather(1, order_TK), rtol=1e-5, atol=1e-7)


def test_router_treats_every_row_alike() -> None:
    """Bit for bit the same for a row alone and among 500; torch's own sigmoid is not."""
    ops, logits_TN = load_ops(DEVICE, "auto"), torch.randn(500, 12, generator=torch.Generator().manual_seed(4)) * 3
    bias_N = torch.linspace(-0.3, 0.3, 12)
    together = route(ops, logits_TN, bias_N, EXPERTS)
    for row in range(500):
        alone = route(ops, logits_TN[row : row + 1].clone(), bias_N, EXPERTS)
        assert torch.equal(alone.expert_TK[0], together.expert_TK[row])
        assert torch.equal(alone.weight_TK[0], together.weight_TK[row])


def test_shares_hold_every_pair_once() -> None:
    logits_TN = torch.randn(50, 12, generator=torch.Generator().manual_seed(5))
    routed = route(load_ops(DEVICE, "reference"), logits_TN, torch.zeros(12), EXPERTS)
    dense_TN, experts = torch.zeros(50, 12), []
    for expert, row_P, weight_P1 in routed.shares():
        assert torch.equal(row_P, torch.unique(row_P))
        dense_TN[row_P, expert] += weight_P1[:, 0]
        experts.append(expert)
    assert experts == sorted(set(experts))
    assert torch.equal(dense_TN, torch.zeros(50, 12).scatter_(1, routed.expert_TK, routed.weight_TK))


def test_config_in_the_spelling_of_published_files() -> None:
    """Kimi K2's file has no head_dim, the old keys of rope, and options that transformers does not read."""
    saved = DeepseekV3Config(**SMALL, rope_parameters=YARN).to_dict()
    new = ("head_dim", "rope_parameters", "rope_interleave", "qk_head_dim", "transformers_version")
    published = {key: value for key, value in saved.items() if key not in new} | {
        "model_type": "kimi_k2",
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "yarn"} | {key: value for key, value in YARN.items() if not key.startswith("rope")},
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    found, expected = read_hf_config(published, None), read_hf_config(saved, None)
    assert found.family == "kimi_k2"
    assert (found.rope, found.attention_scale) == (expected.rope, expected.attention_scale)
    assert found.attention_scale == pytest.approx(24**-0.5 * (0.07 * math.log(8) + 1) ** 2)
    assert (found.head_dim, found.num_kv_heads, found.rope.rotary_dim, found.rope.interleaved) == (24, 4, 8, True)
    assert found.latent == expected.latent == LatentAttention(query_rank=40, latent_rank=24, value_dim=12, bias=False)
    assert found.experts is not None and found.experts == expected.experts
    assert (found.experts.num_experts, found.experts.shared_size, found.experts.first_layer) == (12, 24, 1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n_group": 5}, "12 experts do not make 5 groups of 2 or more"),
        ({"n_group": 12}, "12 experts do not make 12 groups of 2 or more"),
        ({"topk_group": 5}, "3 experts cannot be chosen from 5 of 4 groups of 3"),
        ({"num_experts_per_tok": 7}, "7 experts cannot be chosen from 2 of 4 groups of 3"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be 4, the number of query heads, not 2"),
        ({"v_head_dim": 32}, "v_head_dim must be at most .* 24, not 32"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', not 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc', not 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1, not 2"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be"),
        ({"qk_rope_head_dim": 7}, "odd"),
        ({"n_shared_experts": 0}, "n_shared_experts must be a positive integer"),
    ],
)
def test_refusals_name_the_key(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_hf_config(DeepseekV3Config(**SMALL).to_dict() | overrides, None)
