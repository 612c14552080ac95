"""Families that packages bring by an entry point: the example of docs/new-model.md against transformers, and packages
that are broken, contradict each other, or are for another version."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from model_runtime.checkpoint import load_model
from model_runtime.hf.config import read_hf_config
from model_runtime.models.packages import family_named, known_families
from model_runtime.ops import load_ops
from model_runtime.parallel import tensor_mesh
from model_runtime.weights.errors import CheckpointError
from server.doctor import check_families
from tests.checkpoints import SMALL, make_checkpoint
from tests.family_cases import make_random_model
from tests.model_runtime.memory import assert_activations_as_planned
from tests.model_runtime.paged import DEVICE, PagedRun
from tests.model_runtime.ranks import on_shared_memory
from tests.model_runtime.test_alignment import random_prompts, reference_logits
from tests.model_runtime.test_families import LENGTHS, Case, assert_aligned, logits
from tests.vlm import make_vlm

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "firstlight-arcee"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}


class Packages:
    """Installs packages into a folder on the path, as pip leaves them there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def install(self, name: str, model_type: str, target: str, group: str = "firstlight.families.v1") -> None:
        info = self._folder / f"{name.replace('-', '_')}-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{model_type} = {target}\n")

    def module(self, name: str, text: str) -> None:
        (self._folder / f"{name}.py").write_text(text)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLE)
    yield Packages(tmp_path)
    for name in sys.modules.keys() - before:
        if name.startswith(("firstlight_", "broken")):
            del sys.modules[name]


@pytest.fixture
def arcee(packages: Packages) -> Packages:
    packages.install("firstlight-arcee", "arcee", "firstlight_arcee:FAMILY")
    return packages


def test_ranks_see_whether_they_have_the_same_package(arcee: Packages, tmp_path: Path) -> None:
    """They compare how the architecture prints, which names the package, and no place in memory."""
    config = {**LLAMA, "model_type": "arcee", "hidden_act": "relu2", "eos_token_id": 2}
    assert "own_feed_forward=OwnFeedForward(package='package firstlight-arcee 0.1.0')" in repr(
        read_hf_config(config, None)
    )


def test_activations_of_its_block_are_as_planned(arcee: Packages, tmp_path: Path) -> None:
    """In a step whose largest tensor is the block's."""
    config = CONFIG_MAPPING["arcee"](**{**SMALL, "intermediate_size": 2048})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    decoder = load_model(tmp_path, load_ops(DEVICE, "auto"), DEVICE, lambda fraction: None).decoder
    assert_activations_as_planned(decoder, random_prompts((200,))[0])


@pytest.mark.parametrize("seed", range(3))
def test_example_aligns_with_transformers(arcee: Packages, tmp_path: Path, seed: int) -> None:
    folder, prompts = tmp_path / "checkpoint", random_prompts(LENGTHS)
    case = Case(folder, prompts, reference_logits(make_random_model(folder, "arcee", seed), prompts), 1e-4)
    assert_aligned(logits(case.decoder("auto"), prompts), case)
    found = on_shared_memory(2, lambda collectives: logits(case.decoder("auto", tensor_mesh(collectives)), prompts))
    assert_aligned(found[0], case)


def test_package_that_breaks_is_named_and_stops_no_other_model(packages: Packages) -> None:
    packages.module("broken", "import nothing_of_that_name\n")
    packages.install("firstlight-broken", "broken", "broken:FAMILY")
    assert read_hf_config(LLAMA, None).family == "llama"
    with pytest.raises(CheckpointError, match=r"package firstlight-broken 0\.1\.0: could not load broken:FAMILY: Mod"):
        read_hf_config({**LLAMA, "model_type": "broken"}, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FAMILY = {}", r"broken:FAMILY is no Family but dict"),
        (
            "from model_runtime.family_package import Family\n"
            "FAMILY = Family(finish=lambda read, config: config['nothing'])",
            r"finish failed: KeyError: 'nothing'",
        ),
        (
            "from model_runtime.family_package import Family\nFAMILY = Family(norm_places='arround')",
            r"package firstlight-broken 0\.1\.0: norm_places 'arround' is not one of before, after, around, parallel",
        ),
        (
            "from model_runtime.family_package import ExpertKeys, Family\n"
            "FAMILY = Family(stacked_experts='halfs', experts=ExpertKeys(router='softmax'))",
            r"stacked_experts 'halfs' is not one of alternating, halves",
        ),
        (
            "from model_runtime.family_package import ExpertKeys, Family\n"
            "FAMILY = Family(experts=ExpertKeys(router='softmaxx'))",
            r"router 'softmaxx' is not one of sigmoid, softmax",
        ),
        (
            "from model_runtime.family_package import Family, fail\n"
            "FAMILY = Family(finish=lambda read, config: fail('hidden_size', 32, 'something else'))",
            r"config\.json: hidden_size must be something else, not 32",
        ),
        (
            "from dataclasses import replace\nfrom model_runtime.family_package import Family\n"
            "FAMILY = Family(finish=lambda read, config: replace(read, head_dim=3))",
            r"head_dim 3 is odd",
        ),
    ],
    ids=["no family", "error", "word", "word or none", "word of experts", "refusal", "contradiction"],
)
def test_package_whose_family_is_wrong(packages: Packages, text: str, message: str) -> None:
    packages.module("broken", text)
    packages.install("firstlight-broken", "broken", "broken:FAMILY")
    with pytest.raises(CheckpointError, match=message):
        read_hf_config({**LLAMA, "model_type": "broken"}, None)


def test_doctor_names_what_is_broken(arcee: Packages) -> None:
    assert check_families().state == "ok" and "arcee (package firstlight-arcee 0.1.0)" in check_families().detail
    arcee.install("firstlight-broken", "broken", "nowhere:FAMILY")
    finding = check_families()
    assert (finding.state, finding.subject) == ("warning", "families")
    assert finding.detail.startswith("package firstlight-broken 0.1.0: could not load nowhere:FAMILY: Mod")


def test_two_owners_of_a_model_type(arcee: Packages) -> None:
    arcee.install("other-arcee", "arcee", "firstlight_arcee:FAMILY")
    with pytest.raises(CheckpointError, match=r"'arcee' is registered by package firstlight-arcee 0\.1\.0 and pack"):
        family_named("arcee")
    arcee.install("my-llama", "llama", "firstlight_arcee:FAMILY")
    with pytest.raises(CheckpointError, match=r"registered by package my-llama 0\.1\.0 and firstlight itself: uninst"):
        read_hf_config(LLAMA, None)


def test_package_for_another_version(packages: Packages) -> None:
    packages.install("firstlight-new", "new", "nothing:FAMILY", group="firstlight.families.v2")
    with pytest.raises(CheckpointError, match=r"package firstlight-new 0\.1\.0 has it in the group firstlight\.fam"):
        read_hf_config({**LLAMA, "model_type": "new"}, None)


def test_unknown_model_type_lists_packages_too(arcee: Packages) -> None:
    assert "arcee" in known_families()
    with pytest.raises(CheckpointError, match=r"'nothing' is not supported; supported are arcee, cohere.*; docs/new-"):
        read_hf_config({**LLAMA, "model_type": "nothing"}, None)


def write_respelled(plain: Path, other: Path) -> None:
    """The checkpoint in the spelling of the package below."""
    other.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "broken"}))
    read = load_file(plain / "model.safetensors")
    tensors = {"transformer.counter": torch.zeros(1)}
    for key, tensor in read.items():
        name = key.replace("model.", "transformer.")
        if ".self_attn.q_proj" in key:
            parts = [read[key.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            tensors[name.replace("self_attn.q_proj", "mixed")] = torch.cat(parts)
        elif ".self_attn.k_proj" not in key and ".self_attn.v_proj" not in key:
            tensors[name] = tensor
    save_file(tensors, other / "model.safetensors")


def test_spelling_of_a_package(packages: Packages, tmp_path: Path) -> None:
    """Queries, keys and values one under the other in a matrix of another name, and a tensor that is not used."""
    packages.module(
        "broken",
        "from model_runtime.family_package import Family\n"
        "def spelling(key, rows, config):\n"
        "    if key.endswith('.counter'):\n"
        "        return {}\n"
        "    if '.mixed.' not in key:\n"
        "        return {key.replace('transformer.', 'model.'): slice(0, rows)}\n"
        "    parts, third = ('q_proj', 'k_proj', 'v_proj'), rows // 3\n"
        "    layer = key.replace('transformer.', 'model.')\n"
        "    return {layer.replace('mixed', 'self_attn.' + part): slice(at * third, at * third + third)\n"
        "            for at, part in enumerate(parts)}\n"
        "FAMILY = Family(spelling=spelling)\n",
    )
    packages.install("firstlight-broken", "broken", "broken:FAMILY")
    plain, other = tmp_path / "plain", tmp_path / "other"
    make_checkpoint(plain, "llama", {"num_key_value_heads": 4})
    write_respelled(plain, other)
    ours, theirs = (
        load_model(folder, load_ops(DEVICE, "reference"), DEVICE, lambda fraction: None).decoder
        for folder in (other, plain)
    )
    rows = {0: random_prompts((9,))[0]}
    assert PagedRun(ours).step(rows)[0].equal(PagedRun(theirs).step(rows)[0])


def test_language_model_of_a_package_under_a_known_tower(arcee: Packages, tmp_path: Path) -> None:
    model, prompts = make_vlm(tmp_path, "llava-clip", {"model_type": "arcee"}), random_prompts((11,))
    decoder = load_model(tmp_path, load_ops(DEVICE, "auto"), DEVICE, lambda fraction: None).decoder
    (expected,) = reference_logits(model, prompts)
    assert (PagedRun(decoder).step({0: prompts[0]})[0] - expected).abs().max() <= 1e-4
