"""Start-up of a model with images: what the engine is told of its encoder cache, steps and memory."""

from dataclasses import replace
from pathlib import Path

import pytest

from model_runtime.config import RuntimeConfig, RuntimeInfo
from model_runtime.executor import load_executor
from model_runtime.memory.budget import PlanError, size_pool
from model_runtime.memory.images import ImageMemory, encode_bytes, image_pixels
from model_runtime.memory.steps import activation_bytes, step_tokens
from model_runtime.weights.json_file import read_json
from scheduler.config import SchedulerConfig
from tests.model_runtime.memory import MODEL
from tests.vlm import make_vlm
from tests.vlm_cases import HIDDEN
from vision.encoder.readers import read_vision

SCHEDULER = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16)
CACHE = 3 * 2**20


def info_of(name: str, folder: Path, scheduler: SchedulerConfig = SCHEDULER) -> RuntimeInfo:
    make_vlm(folder, name)
    runtime = RuntimeConfig(num_kv_blocks=64, max_model_len=1024, encoder_cache_bytes=CACHE)
    return load_executor(folder, runtime, scheduler, lambda stage, fraction: None).info


@pytest.mark.parametrize(("name", "levels"), [("llava-clip", 0), ("qwen3_vl", 2)])
def test_an_embedding_takes_a_vector_for_the_model_and_one_a_level(name: str, levels: int, tmp_path: Path) -> None:
    info = info_of(name, tmp_path)
    assert info.bytes_per_embedding == 4 * HIDDEN * (1 + levels)
    assert info.encoder_cache_bytes == CACHE
    assert (info.whole_span, info.max_num_batched_tokens) == (0, 16)


def test_a_step_is_large_enough_for_an_image_that_must_not_be_cut(tmp_path: Path) -> None:
    info = info_of("gemma3", tmp_path)
    assert (info.whole_span, info.max_num_batched_tokens) == (16, 4 + 16)


def test_the_largest_image_takes_a_quarter_of_the_budget_at_most(tmp_path: Path) -> None:
    make_vlm(tmp_path, "qwen2_vl")
    tower = read_vision(read_json(tmp_path / "config.json"), HIDDEN)
    whole = 1_000_000
    room = encode_bytes(tower, whole)
    assert image_pixels(tower, whole, 100, 4 * room) == whole
    assert image_pixels(tower, whole, 100, 2 * room) == whole // 2
    assert image_pixels(tower, whole, 100, 0) == 100
    assert image_pixels(tower, 50, 100, 100 * room) == 100


def test_the_largest_image_is_what_the_recipe_makes_of_a_large_one(tmp_path: Path) -> None:
    info = info_of("llava-clip", tmp_path, replace(SCHEDULER, max_encode_pixels=1))
    tile = read_json(tmp_path / "config.json")["vision_config"]["image_size"]
    assert info.max_image_pixels == tile**2


def test_a_cache_that_holds_no_image_is_refused_at_start(tmp_path: Path) -> None:
    make_vlm(tmp_path, "llava-clip")
    config = read_json(tmp_path / "config.json")["vision_config"]
    needed = (config["image_size"] // config["patch_size"]) ** 2 * HIDDEN * 4

    def start(cache: int) -> RuntimeInfo:
        runtime = RuntimeConfig(num_kv_blocks=64, max_model_len=1024, encoder_cache_bytes=cache)
        return load_executor(tmp_path, runtime, SCHEDULER, lambda stage, fraction: None).info

    assert start(needed).encoder_cache_bytes == needed
    with pytest.raises(PlanError, match=f"encoder_cache_bytes {needed - 1} is less than the {needed} bytes"):
        start(needed - 1)


def test_a_large_step_stays_as_it_is_configured() -> None:
    whole = replace(MODEL, image_span=256)
    assert step_tokens(whole, SCHEDULER) == 260
    assert step_tokens(whole, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=300)) == 300
    assert step_tokens(MODEL, SCHEDULER) == 16


def test_images_are_in_the_budget() -> None:
    """Their cache always, their encoding where it takes more than a step does."""
    step, block, weights = activation_bytes(MODEL, 16, 4), 8192, 10**6

    def num_blocks(budget: int, images: ImageMemory) -> int:
        pool = size_pool(
            MODEL,
            RuntimeConfig(),
            SCHEDULER,
            budget=budget,
            weight_bytes=weights,
            block_bytes=block,
            step=step,
            images=images,
        )
        return pool.num_blocks

    small, large = ImageMemory(cache=CACHE, encode=step - 1), ImageMemory(cache=CACHE, encode=step + 5 * block)
    budget = weights + step + CACHE + 100 * block
    assert (num_blocks(budget, small), num_blocks(budget - 1, small)) == (100, 99)
    assert (num_blocks(budget, large), num_blocks(budget - 1, large)) == (95, 94)
    with pytest.raises(PlanError, match="raise memory_budget"):
        num_blocks(weights + step + CACHE, small)
