"""Which device is chosen, and what is refused; on a GPU, the engine there against the engine on CPU."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model_runtime.config import RuntimeConfig
from model_runtime.device import activation_dtype, choose_device, default_budget
from model_runtime.executor import load_executor
from model_runtime.graphs import block_size
from model_runtime.memory.budget import PlanError
from scheduler.config import SchedulerConfig
from scheduler.plan import ints
from scheduler.request import Request, SamplingParams
from server.engine import make_scheduler
from server.tiny_vlm import write_tiny_vlm
from tests.checkpoints import make_checkpoint
from tests.model_runtime.flash import GPU
from tests.vision.preprocess_pictures import as_pil, picture
from tests.vlm_engine import Engine, Gateway, Outcome, request

CPU = torch.device("cpu")
SCHEDULER = SchedulerConfig(max_num_seqs=4)


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert choose_device("cpu") == CPU
    with pytest.raises(
        PlanError, match=r"device cuda cannot be used: torch .* is built without CUDA; set device to cpu"
    ):
        choose_device("cuda")


def test_a_machine_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlanError, match="torch finds no CUDA device"):
        choose_device("cuda")


def test_a_card_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(PlanError, match=r"Tesla T4 has compute capability 7\.5, needed is 8\.0"):
        choose_device("cuda")


def test_a_card_that_will_do(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    assert choose_device("cpu") == CPU
    assert choose_device("cuda") == torch.device("cuda", 0)
    assert "H200: this path has not been tested on a card" in caplog.text
    assert default_budget(torch.device("cuda", 0)) == 900
    assert block_size(torch.device("cuda", 0), 16) == 256
    assert block_size(CPU, 16) == 16


def test_devices_that_torch_does_not_know() -> None:
    with pytest.raises(PlanError, match=r"torch .* knows no device 'abacus': set device to cpu, cuda, or what its"):
        choose_device("abacus")
    with pytest.raises(PlanError, match="device meta computes nothing"):
        choose_device("meta")


@pytest.mark.skipif(GPU, reason="there is a device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(PlanError, match=r"device xpu cannot be used: .*; set device to cpu"):
        choose_device("xpu")
    with pytest.raises(PlanError, match="torch cannot tell how much memory xpu has: set memory_budget"):
        default_budget(torch.device("xpu"))
    assert block_size(torch.device("xpu"), 16) == 16


def test_a_device_of_another_maker(tmp_path: Path) -> None:
    """Text and images, in a process of its own, since torch never forgets a device."""
    text, images = tmp_path / "text", tmp_path / "images"
    make_checkpoint(text, "qwen3", {"max_position_embeddings": 1024})
    images.mkdir()
    write_tiny_vlm(images)
    command = [sys.executable, "-m", "tests.model_runtime.toy_device", str(text), str(images)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["toy"] == found["cpu"]
    assert found["offloaded"] == found["cpu"][0]
    assert [len(token_ids) for token_ids in found["toy"][0]] == [8, 8, 8]


def test_type_of_activations() -> None:
    cuda = torch.device("cuda", 0)
    for stored in (torch.float32, torch.bfloat16, torch.float16):
        assert activation_dtype(cuda, stored, exact=False) == stored
        assert activation_dtype(cuda, stored, exact=True) == torch.float32
        assert activation_dtype(CPU, stored, exact=False) == torch.float32
    assert activation_dtype(cuda, None, exact=False) == torch.bfloat16


def test_the_scheduler_takes_the_blocks_of_the_runtime(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", {})
    info = load_executor(tmp_path, RuntimeConfig(), SCHEDULER, lambda stage, fraction: None).info
    scheduler = make_scheduler(SCHEDULER, replace(info, block_size=256, num_blocks=3, max_model_len=600))
    scheduler.add(Request(seq_id=0, prompt_ids=ints([5] * 257), sampling=SamplingParams(max_tokens=1)), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None and list(plan.kv_lens) == [256] and len(plan.block_tables) == 1


@pytest.mark.skipif(GPU, reason="there is a CUDA device")
def test_the_engine_says_that_there_is_no_card(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="device cuda cannot be used"):
        load_executor(tmp_path, RuntimeConfig(device="cuda"), SCHEDULER, lambda stage, fraction: None)


# On a GPU


def answers(folder: Path, engine: Engine) -> dict[int, Outcome]:
    """Greedy answers to prompts of several lengths, more of them than run at a time."""
    sampling = SamplingParams(max_tokens=20, temperature=0.0, logprobs=2)
    prompts = [[index % 250 + 3 for index in range(seq_id, 60 * seq_id + 1)] for seq_id in range(1, 8)]
    return engine.run(
        Request(seq_id=seq_id, prompt_ids=ints(prompt), sampling=sampling) for seq_id, prompt in enumerate(prompts)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_the_engine_on_a_gpu(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    make_checkpoint(tmp_path, family, {"max_position_embeddings": 1024}, dtype)
    found = answers(tmp_path, Engine(tmp_path, SCHEDULER, device="cuda", num_kv_blocks=64))
    expected = answers(tmp_path, Engine(tmp_path, SCHEDULER))
    for seq_id, outcome in expected.items():
        assert len(found[seq_id].token_ids) == 20
        if dtype == torch.float32:
            assert found[seq_id].token_ids == outcome.token_ids
        assert abs(found[seq_id].logprobs[0].top[0][1] - outcome.logprobs[0].top[0][1]) <= 0.1


@pytest.mark.gpu
def test_images_on_a_gpu(tmp_path: Path) -> None:
    write_tiny_vlm(tmp_path)
    parts = [{"type": "text", "text": "Who is "}, {"type": "image"}, {"type": "text", "text": "?"}]
    prompt = Gateway(tmp_path).prompt([{"role": "user", "content": parts}], [as_pil(picture(90, 60, 0))])
    _, found_LV = Engine(tmp_path, SCHEDULER, device="cuda", num_kv_blocks=16).logits_of(request(0, prompt, 4))
    _, expected_LV = Engine(tmp_path, SCHEDULER).logits_of(request(0, prompt, 4))
    assert (found_LV.cpu() - expected_LV).norm() / expected_LV.norm() <= 0.05
