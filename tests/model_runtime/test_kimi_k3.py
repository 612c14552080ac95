"""Kimi K3's language model: its blocks against plain formulas and what transformers has of them, and the whole against
a model written down apart, through the paged path."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import NemotronHConfig
from transformers.models.inkling2.modeling_inkling2 import Inkling2SoftcappedSwiGLU, Inkling2TextConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

from model_runtime.align.product import load_product
from model_runtime.batch import make_batch
from model_runtime.blocks.mixer import mix
from model_runtime.blocks.mlp import MLP
from model_runtime.blocks.moe import MixtureOfExperts
from model_runtime.checkpoint import load_model
from model_runtime.config import RuntimeConfig
from model_runtime.hf.config import read_hf_config
from model_runtime.memory.budget import PlanError
from model_runtime.memory.caches import cache_block_bytes, state_bytes
from model_runtime.models.decoder import Decoder, decoder_table
from model_runtime.models.depth import Mixture
from model_runtime.opening import open_configuration
from model_runtime.ops import load_ops
from model_runtime.ops.registry import Ops
from model_runtime.parallel import ONE_RANK, Alone, Mesh, tensor_mesh
from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.table import Parameters
from tests.model_runtime import kimi_k3
from tests.model_runtime.deepseek import EXPERTS
from tests.model_runtime.memory import MODEL, assert_activations_as_planned
from tests.model_runtime.op_cases import randn
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.ranks import on_shared_memory, stage_mesh
from tests.model_runtime.test_alignment import random_prompts
from tests.model_runtime.test_families import BLOCK, SHARED_BLOCKS, logits

TOLERANCE = 3e-4
"""Of float32; a state goes through many products."""
LENGTHS = (37, 1, 19)


def loaded(folder: Path, kernels: str, mesh: Mesh = ONE_RANK, *, whole: bool = False) -> Decoder:
    ops = load_ops(DEVICE, kernels)
    return load_model(folder, ops, DEVICE, lambda done: None, mesh=mesh, whole_experts=whole).decoder


def test_the_whole_model(tmp_path: Path) -> None:
    """By compiled kernels and plain torch, alone and on two ranks, which have parts of all experts or some wholly; in
    chunks, and behind blocks and a state of a text before."""
    reference, prompts = kimi_k3.Reference(kimi_k3.write_checkpoint(tmp_path)), random_prompts(LENGTHS)
    expected = [reference.logits(prompt) for prompt in prompts]
    expected.append(expected[-1][SHARED_BLOCKS * BLOCK :])
    alone = [logits(loaded(tmp_path, kernels), prompts) for kernels in ("auto", "reference")]
    ranks = [
        on_shared_memory(
            2, lambda group, whole=whole: logits(loaded(tmp_path, "auto", tensor_mesh(group), whole=whole), prompts)
        )[0]
        for whole in (False, True)
    ]
    for found in (*alone, *ranks):
        for ours, theirs in zip(found, expected, strict=True):
            assert theirs.std() > 0.5
            assert (ours - theirs).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_each_block(tmp_path: Path, kernels: str) -> None:
    """Of rows of its own: attention with its gate, delta attention, both feed-forward blocks, and a mixture of sums."""
    reference, (tokens,) = kimi_k3.Reference(kimi_k3.write_checkpoint(tmp_path)), random_prompts((9,))
    decoder, x = loaded(tmp_path, kernels), randn(9, kimi_k3.HIDDEN, seed=1)
    run, sums = PagedRun(decoder), [randn(9, kimi_k3.HIDDEN, seed=seed) for seed in (2, 3, 4)]
    batch, (delta, latent) = make_batch(run.plan({0: tokens}), run.block_size), decoder.layers[:2]
    table, ops, key = decoder.rotations.table, decoder.ops, "model.layers"
    mixture = Mixture(decoder.config, "layers.3.mlp_mixture", decoder.parameters)
    exact, exact_sums = x.double(), [each.double() for each in sums]
    with torch.inference_mode():
        found = {
            "kda": (mix(delta.attention, ops, x, table, batch, run.kv[0]), reference.kda(f"{key}.0.self_attn", exact)),
            "attention": (
                mix(latent.attention, ops, x, table, batch, run.kv[1]),
                reference.attention(f"{key}.1.self_attn", exact),
            ),
            "dense": (delta.mlp.forward(ops, x), reference.gated(f"{key}.0.mlp", exact)),
            "experts": (latent.mlp.forward(ops, x), reference.experts(f"{key}.1.block_sparse_moe", exact)),
            "mixture": (mixture.forward(ops, sums), reference.mixture(f"{key}.3.mlp_res", exact_sums)),
        }
    for name, (ours, theirs) in found.items():
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max(), name


def test_the_whole_model_in_float64(tmp_path: Path) -> None:
    """All but states, which are float32."""
    reference, (prompt,) = kimi_k3.Reference(kimi_k3.write_checkpoint(tmp_path, seed=1)), random_prompts((30,))
    decoder = loaded(tmp_path, "reference")
    decoder.dtype = torch.float64
    run = PagedRun(decoder, kv_type=torch.float64)
    hidden = decoder.forward(make_batch(run.plan({0: prompt}), run.block_size), run.kv)
    assert decoder.head is not None
    found = decoder.ops.linear(decoder.final_norm(hidden), decoder.head, None)
    assert (found - reference.logits(prompt)).abs().max() <= 2e-5


def test_stages_are_refused(tmp_path: Path) -> None:
    kimi_k3.write_checkpoint(tmp_path)
    with pytest.raises(PlanError, match=r"groups of earlier layers .* leave pipeline_parallel_size out"):
        load_model(tmp_path, load_ops(DEVICE, "auto"), DEVICE, lambda done: None, mesh=stage_mesh(0, 2))


def test_alignment_is_refused(tmp_path: Path) -> None:
    kimi_k3.write_checkpoint(tmp_path)
    with pytest.raises(PlanError, match="align follows one sum through all layers"):
        load_product(tmp_path, RuntimeConfig(threads=1), lambda done: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_situ_beta": 2.0}, "activation_situ_beta must be 4.0, not 2.0"),
        ({"hidden_act": "silu"}, "hidden_act must be 'situ', not 'silu'"),
        ({"mla_use_nope": False}, "mla_use_nope must be True, not False"),
        ({"attn_res_block_size": 0}, "attn_res_block_size must be a positive integer, not 0"),
        ({"linear_attn_config": {"full_attn_layers": [1]}}, "kda_layers is missing"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_hf_config(kimi_k3.CONFIG | {"text_config": kimi_k3.TEXT | changes}, None)


def test_activations_are_as_planned(tmp_path: Path) -> None:
    """The bank of earlier layers and the mixtures too."""
    kimi_k3.write_checkpoint(tmp_path)
    assert_activations_as_planned(loaded(tmp_path, "auto"), random_prompts((200,))[0])


def test_the_published_size(tmp_path: Path) -> None:
    """Numbers by hand: 2.78e12 in all, of which experts are stored in four bits; a token takes 27 KiB."""
    (tmp_path / "config.json").write_text(json.dumps(kimi_k3.PUBLISHED))
    opened = open_configuration(tmp_path / "config.json")
    config = opened.config
    kda = 7168 * 12288 * 4 + 12288 * 7168 + 7168 * 128 + 128 * 12288 + 7168 * 96 + 12288 * (3 * 4 + 1) + 96 + 128
    mla = 7168 * 1536 + 1536 * 96 * 192 + 7168 * 576 + 512 * 96 * 256 + 7168 * 12288 + 12288 * 7168 + 1536 + 512
    routed, shared = 896 * 3 * 3584 * 3072, 3 * 7168 * 6144
    moe = routed + shared + 2 * 7168 * 3584 + 3584 + 896 * 7168 + 896
    layers = 69 * kda + 24 * mla + 92 * moe + 3 * 7168 * 33792 + 93 * 6 * 7168
    total = layers + 2 * 163840 * 7168 + 3 * 7168
    table = decoder_table(config, first_expert_only=True)
    found = sum(part.rows * (part.columns or 1) * (896 if part.expert is not None else 1) for part in table)
    assert found == total
    assert total / 1e9 == pytest.approx(2779.5, abs=0.5)
    assert cache_block_bytes(config, 1, torch.bfloat16) == 24 * (512 + 64) * 2
    assert cache_block_bytes(config, 256, torch.int8) == 24 * 256 * (512 + 64 + 8)
    assert state_bytes(config) == 4 * 69 * (3 * 3 * 12288 + 96 * 128 * 128)
    experts = {key for key, tensor in opened.source.items() if tensor.format is not None}
    assert experts == {slot.key for part in table if part.expert is not None for slot in part.slots}


class Gated(torch.nn.Module):
    """What stands in for Nemotron-H's experts and shared block, whose feed-forward blocks have no gate."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self._gate_up, self._down = gate_up, down

    def forward(self, x: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        def block(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            gate, up = (x @ gate_up.T).chunk(2, dim=-1)
            return (torch.nn.functional.silu(gate) * up) @ down.T

        if chosen is None or weights is None:
            return block(x, self._gate_up, self._down)
        rows = [
            sum(
                weight * block(row, self._gate_up[expert], self._down[expert])
                for expert, weight in zip(*of, strict=True)
            )
            for row, *of in zip(x, chosen.tolist(), weights, strict=True)
        ]
        return torch.stack([row for row in rows if isinstance(row, Tensor)])


def test_experts_on_shorter_vectors(ops: Ops) -> None:
    """Nemotron-H's mixture, whose sum is not normalised: its router, and its way to the experts and back."""
    sizes = {"hidden_size": 64, "moe_latent_size": 24, "n_routed_experts": 6, "num_experts_per_tok": 2}
    groups = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.7}
    theirs = NemotronHMoE(NemotronHConfig(**sizes, **groups, moe_intermediate_size=16, mlp_bias=False))
    gate_up, down = randn(6, 2 * 16, 24, seed=1), randn(6, 24, 16, seed=2)
    shared = randn(2 * 20, 64, seed=3) * 0.2, randn(64, 20, seed=4) * 0.2
    theirs.experts, theirs.shared_experts = Gated(gate_up, down), Gated(*shared)
    theirs.gate.weight.data, theirs.gate.e_score_correction_bias.data = randn(6, 64, seed=5), randn(6, seed=6)
    matrices = {
        "router.weight": theirs.gate.weight,
        "narrow.weight": theirs.fc1_latent_proj.weight,
        "widen.weight": theirs.fc2_latent_proj.weight,
        "shared.gate_up.weight": shared[0],
        "shared.down.weight": shared[1],
    }
    for expert in range(6):
        matrices |= {f"experts.{expert}.gate_up.weight": gate_up[expert], f"experts.{expert}.down.weight": down[expert]}
    packed = {f".{name}": ops.pack(matrix.detach()) for name, matrix in matrices.items()}
    mixture = replace(EXPERTS, num_experts=6, num_chosen=2, num_groups=1, num_chosen_groups=1, scale=1.7)
    config = replace(MODEL, experts=replace(mixture, hidden_size=24))
    parameters = Parameters(packed, {".choice_bias": theirs.gate.e_score_correction_bias.data})
    x = randn(30, 64, seed=7)
    with torch.inference_mode():
        found = MixtureOfExperts(config, "", parameters, Alone()).forward(ops, x)
        torch.testing.assert_close(found, theirs(x[None])[0], rtol=1e-4, atol=1e-4)


def test_situ(ops: Ops) -> None:
    """inkling2's function, with other bounds in its config."""
    config = replace(MODEL, activation="situ")
    gate_up, down = randn(2 * 24, 64, seed=1), torch.eye(24)
    matrices = {"gate_up.weight": ops.pack(gate_up), "down.weight": ops.pack(down)}
    block = MLP(config, "", Parameters({f".{name}": matrix for name, matrix in matrices.items()}, {}))
    theirs = Inkling2SoftcappedSwiGLU(Inkling2TextConfig(mlp_gate_softcap=4.0, mlp_up_softcap=25.0))
    x = randn(9, 64, seed=2) * 3
    gate, up = ops.linear(x, matrices["gate_up.weight"], None).chunk(2, dim=1)  # whose last bits SiTU makes larger
    assert gate.abs().max() > 30 and up.abs().max() > 30
    torch.testing.assert_close(block.forward(ops, x), theirs(gate, up), rtol=1e-5, atol=1e-5)
