"""Conversations that nobody chose: random texts and pictures against transformers, and random workloads of them against
each one alone, bit for bit. Every draw is seeded."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from scheduler.config import SchedulerConfig
from scheduler.request import Request, SamplingParams
from tests.vlm import make_vlm
from tests.vlm_cases import VLMS
from tests.vlm_engine import Engine, Gateway, Outcome, request
from tests.vlm_oracle import Messages, Oracle

TOLERANCE = 2e-4
"""Logits reach 25; texts without pictures differ by as much."""
IN_CHUNKS = 1e-3
"""Where transformers computes states in chunks of 64 tokens, in float32."""
STEPS = 12
ROUNDS = 5
WORDS = (
    "Hello",
    " what is\n",
    "\n\n",
    "a",
    "  x\n",
    "Now: ",
    "?",
    "\tthe answer",
    "è…",
    "a longer text that goes on and on",
)
DEEPER: Mapping[str, object] = {"num_hidden_layers": 5, "num_key_value_heads": 1}
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
TEXTS: Mapping[str, Mapping[str, object]] = {
    "gemma3": {**DEEPER, "layer_types": WINDOWS, "sliding_window": 5},
    "gemma3-wide-window": {**DEEPER, "layer_types": WINDOWS},
    "kimi_k25": {"num_hidden_layers": 5},
    "qwen3_5": {**DEEPER, "layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"]},
}
"""What language models have that DEEPER is no change for."""
ONE_TOKEN = ("llava-pixtral", "mistral3")
"""transformers fails on a picture that is one embedding."""


def said(role: str, *parts: str) -> dict[str, Any]:
    """A message; the part "IMAGE" stands for a picture."""
    return {
        "role": role,
        "content": [{"type": "image"} if part == "IMAGE" else {"type": "text", "text": part} for part in parts],
    }


def drawn_picture(draw: random.Random, least: int = 1) -> Image.Image:
    """Any shape: a dot, a strip, a page."""
    short, long = draw.choice([(least, least + 2), (least, 40), (20, 600), (10, 120), (40, 120)])
    sides = [draw.randint(short, max(short, long // 4)), draw.randint(short, long)]
    draw.shuffle(sides)
    cells = np.random.default_rng(draw.randrange(2**32)).integers(0, 256, (7, 5, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((sides[0], sides[1]), Image.Resampling.BILINEAR)


def drawn_conversation(draw: random.Random, least: int) -> tuple[Messages, list[Image.Image]]:
    """One to three turns with 0 to 4 pictures between texts, sometimes with a system message."""
    turns, messages = draw.randint(1, 3), [said("system", "Be terse.")] if draw.random() < 0.4 else []
    owners = [draw.randrange(turns) for _ in range(draw.choice([0, 1, 1, 2, 3, 4]))]
    for turn in range(turns):
        parts = [*draw.choices(WORDS, k=draw.randint(1, 2)), *("IMAGE" for owner in owners if owner == turn)]
        draw.shuffle(parts)
        messages += [said("user", *parts), said("assistant", draw.choice(WORDS))]
    return messages[:-1], [drawn_picture(draw, least) for _ in owners]


@pytest.mark.parametrize("name", VLMS)
def test_random_conversations_are_answered_as_by_transformers(name: str, tmp_path: Path) -> None:
    """Ids, the logits of every row and greedy text, in whole and in small steps, with prompts out of the cache."""
    draw, least = random.Random(name), 12 if name in ONE_TOKEN else 1
    tolerance = IN_CHUNKS if name == "qwen3_5" else TOLERANCE
    oracle, gateway = Oracle(name, make_vlm(tmp_path, name, TEXTS.get(name, DEEPER))), Gateway(tmp_path)
    engines = [
        Engine(
            tmp_path, SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=tokens, block_size=8, prefill_share=1.0)
        )
        for tokens in (1024, 11)
    ]
    for number in range(ROUNDS):
        messages, pictures = drawn_conversation(draw, least)
        ids, features = oracle.inputs(messages, pictures)
        prompt = gateway.prompt(messages, pictures)
        assert list(prompt.ids) == ids
        outcome, logits_LV = engines[number % 2].logits_of(request(0, prompt, STEPS))
        expected_LV = oracle.logits([*ids, *outcome.token_ids], features)[outcome.cached_tokens : -1]
        assert expected_LV.shape == logits_LV.shape
        assert (logits_LV - expected_LV).abs().max().item() <= tolerance
        chosen_S = expected_LV[-STEPS:].gather(1, torch.tensor(outcome.token_ids)[:, None])[:, 0]
        assert (expected_LV[-STEPS:].amax(1) - chosen_S).max().item() <= 2 * tolerance


def visible(outcome: Outcome) -> tuple[object, ...]:
    return (outcome.token_ids, outcome.logprobs, outcome.prompt_logprobs, outcome.finish_reason)


def drawn_requests(draw: random.Random, gateway: Gateway) -> list[Request]:
    """Texts and pictures that have beginnings in common, some asked twice with other seeds as one request's choices."""
    shared = [drawn_picture(draw, 12) for _ in range(3)]
    requests: list[Request] = []
    for seq_id in range(7):
        count = draw.randint(0, 3) if seq_id else 2
        parts = [*(["The same beginning of a text"] if draw.random() < 0.6 else []), *["IMAGE"] * count]
        messages = [said("user", *parts, draw.choice(WORDS))]
        if draw.random() < 0.5:
            messages += [said("assistant", "Yes."), said("user", "More")]
        prompt = gateway.prompt(messages, [draw.choice(shared) for _ in range(count)])
        sampling = SamplingParams(
            max_tokens=draw.randint(3, 10),
            temperature=draw.choice([0.0, 0.9]),
            seed=seq_id,
            logprobs=3,
            prompt_logprobs=draw.choice([-1, -1, 2]),
        )
        first = Request(seq_id=seq_id, prompt_ids=prompt.ids, images=prompt.images, sampling=sampling)
        requests.append(first)
        if draw.random() < 0.4:
            requests.append(
                replace(first, seq_id=50 + seq_id, leader=seq_id, sampling=replace(sampling, seed=50 + seq_id))
            )
    return requests


def drawn_engine(draw: random.Random, model: Path, longest: int, embedding_bytes: int) -> Engine:
    """Steps, blocks and caches of any size in which the longest request has room."""
    block_size = draw.choice([1, 4, 16])
    config = SchedulerConfig(
        max_num_seqs=draw.choice([2, 3, 8]),
        max_num_batched_tokens=draw.choice([8, 13, 40, 1024]),
        block_size=block_size,
        prefill_share=draw.choice([0.3, 1.0]),
        enable_prefix_caching=draw.random() < 0.7,
        max_encode_pixels=draw.choice([1, 3000, 1 << 20]),
    )
    return Engine(
        model,
        config,
        num_kv_blocks=longest // block_size + draw.randint(2, 6),
        encoder_cache_bytes=embedding_bytes * draw.choice([1, 2, 9]),
    )


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "llava_next", "idefics3", "mistral3"])
def test_random_workloads_answer_as_each_request_alone(name: str, tmp_path: Path) -> None:
    """In pools that hold little more than the longest request, twice each."""
    make_vlm(tmp_path, name)
    draw = random.Random(f"workload of {name}")
    gateway = Gateway(tmp_path)
    requests = drawn_requests(draw, gateway)
    # an engine starts only if its cache has room for this one
    usual = gateway.prompt([said("user", "IMAGE")], [Image.new("RGB", (224, 224))]).images.images[0]
    whole = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=1024, prefill_share=1.0)
    expected: dict[int, tuple[object, ...]] = {}
    for one in requests:
        alone = Engine(tmp_path, whole)
        expected[one.seq_id] = visible(alone.run([replace(one, leader=None)])[one.seq_id])
    longest = max(len(one.prompt_ids) + one.sampling.max_tokens for one in requests)
    embeddings = max(image.num_embeddings for image in (usual, *(i for one in requests for i in one.images.images)))
    for _ in range(4):
        engine = drawn_engine(draw, tmp_path, longest, embeddings * alone.info.bytes_per_embedding)
        for _ in range(2):
            outcomes = engine.run(requests)
            assert {seq_id: visible(outcome) for seq_id, outcome in outcomes.items()} == expected
