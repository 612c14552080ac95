"""A small architecture, and what memory a piece of work really takes."""

from collections.abc import Callable

import pytest
import torch
from torch.profiler import profile

from model_runtime.architecture import ModelConfig, RopeConfig
from model_runtime.batch import make_batch
from model_runtime.memory.steps import activation_bytes
from model_runtime.models.decoder import Decoder
from tests.model_runtime.paged import PagedRun

MODEL = ModelConfig(
    family="llama",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position=1024,
    rope=RopeConfig(theta=1e4, rotary_dim=16),
    sliding_windows=(0, 0),
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    tie_word_embeddings=True,
    eos_token_ids=(2,),
)


def measured_bytes(work: Callable[[], object]) -> tuple[int, int]:
    """(largest sum of living tensors, what is left of it) of those that `work` makes, as torch's own profiler sees
    them; its result counts as gone."""
    with profile(profile_memory=True) as events:
        work()
    living = peak = 0
    for event in events.profiler.kineto_results.events():
        if event.name() == "[memory]":
            living += event.nbytes()
            peak = max(peak, living)
    return peak, living


def assert_activations_as_planned(decoder: Decoder, prompt: list[int]) -> None:
    """The largest sum of living tensors in a step of the prompt is what memory was planned for, within 10 %."""
    run = PagedRun(decoder)
    batch = make_batch(run.plan({0: prompt}), run.block_size)
    with torch.inference_mode():
        peak, _ = measured_bytes(lambda: decoder.forward(batch, run.kv))
    assert peak == pytest.approx(activation_bytes(decoder.config, len(prompt), 0), rel=0.1)
