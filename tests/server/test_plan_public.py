"""`firstlight plan` of published configurations: what it prints is what the arithmetic gives that is written out here,
with numbers from the configurations alone.

Bytes: a bfloat16 takes 2, a float32 (all norms) 4, and of DeepSeek's 8-bit floats 128 neighbours of a row take 132, as
they have a scale.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from server.cli import main

CONFIGS = Path(__file__).parent.parent / "public_configs"
BF16, F32 = 2, 4
AS_STORED = ("--quantization", "none", "--kv-cache-dtype", "auto")


def plan(name: str, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    with pytest.raises(SystemExit):
        main(["plan", str(CONFIGS / f"{name}.json"), *words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def way(found: dict[str, Any], tensor: int, *, experts: bool = False, kv: str = "auto") -> dict[str, Any]:
    """Ranks that share layers and nothing else, with weights as stored."""
    wanted = {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": experts,
        "quantization": "none",
        "kv_cache_dtype": kv,
    }
    (only,) = [candidate for candidate in found["candidates"] if wanted.items() <= candidate.items()]
    return dict(only)


def fp8(numbers: int) -> int:
    return numbers * 132 // 128


def test_8b(capsys: pytest.CaptureFixture[str]) -> None:
    """One card. 32 layers: q and o of 32 heads, k and v of 8, of 128 channels; gate, up and down of 14336 columns."""
    found = plan("Llama-3.1-8B-Instruct", capsys, "--devices", "H100", "--concurrency", "2")
    embedding = head = 128256 * 4096
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    mlp = 32 * (3 * 4096 * 14336)
    norms = (2 * 32 + 1) * 4096
    assert found["parameters"] == embedding + head + attention + mlp + norms == 8_030_261_248
    one = way(found, 1)
    blocks, a_token = 2 * 131072 // 256, 32 * (8 * 128 + 8 * 128) * BF16
    assert one["fullest_rank"]["parts"] == {
        "embedding": embedding * BF16,
        "attention": attention * BF16,
        "mlp": mlp * BF16,
        "norms": norms * F32,
        "head": head * BF16,
        "rotations": 131072 * (64 + 64) * F32,
        # two sequences, and the block of what fills up a graph
        "keys and values": (blocks + 1) * 256 * a_token,
        # logits of the 11 rows that scoring 64 in plain torch is worth, 18 floats for each, and 256 hidden states
        "largest step": (256 * 4096 + 11 * 128256 * 18) * F32,
    }
    assert a_token == 131_072 and one["sequences"] == 2
    assert way(found, 1, kv="int8")["fullest_rank"]["parts"]["keys and values"] == (blocks + 1) * 256 * 32 * 2 * 8 * 132


def test_70b(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight cards: each has 8 of 64 query heads, one of 8 key/value heads, 3584 of 28672 columns, 16032 tokens."""
    found = plan("Llama-3.3-70B-Instruct", capsys, "--devices", "8x96GiB", "--context", "32768")
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    assert found["parameters"] == 2 * 128256 * 8192 + 80 * layer + 8192 == 70_553_706_496
    eight = way(found, 8)
    parts = eight["fullest_rank"]["parts"]
    assert parts["embedding"] == parts["head"] == 16032 * 8192 * BF16
    assert parts["attention"] == 80 * (2 * 8192 * 1024 + 2 * 8192 * 128) * BF16
    assert parts["mlp"] == 80 * (3 * 8192 * 3584) * BF16
    assert parts["norms"] == (2 * 80 + 1) * 8192 * F32
    assert parts["keys and values"] == (32768 // 256 + 1) * 256 * (80 * (128 + 128) * BF16)
    assert {rank["weights"] for rank in eight["ranks"]} == {
        sum(parts[part] for part in ("embedding", "attention", "mlp", "norms", "head"))
    }
    one = way(found, 1)
    assert one["problem"] == "needs 141.6 GiB for one sequence, has 86.4 GiB"
    a_sequence = 33024 * 80 * 2 * 8 * 128 * BF16
    assert pytest.approx(70_553_706_496 * BF16 + a_sequence, rel=0.002) == 141.6 * 2**30


def test_235b(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight cards with 16 of 128 experts each. Four key/value heads: every two cards have the same one."""
    found = plan("Qwen3-235B-A22B", capsys, "--devices", "8x96GiB", "--context", "40960", *AS_STORED)
    attention = 2 * 4096 * 8192 + 2 * 4096 * 512
    experts, router, norms = 128 * 3 * 4096 * 1536, 128 * 4096, 2 * 4096 + 2 * 128
    assert found["parameters"] == 2 * 151936 * 4096 + 94 * (attention + experts + router + norms) + 4096
    assert found["parameters"] == 235_093_634_560
    parts = way(found, 8, experts=True)["fullest_rank"]["parts"]
    assert parts["embedding"] == parts["head"] == 18992 * 4096 * BF16
    assert parts["attention"] == 94 * (2 * 4096 * 1024 + 2 * 4096 * 128) * BF16
    assert parts["experts"] == 94 * 16 * (3 * 4096 * 1536) * BF16
    assert parts["mlp"] == 94 * router * BF16
    assert parts["norms"] == (94 * norms + 4096) * F32
    assert parts["keys and values"] == (40960 // 256 + 1) * 256 * (94 * (128 + 128) * BF16)
    # columns of every expert are as many numbers as some experts wholly
    assert way(found, 8)["fullest_rank"]["parts"]["experts"] == parts["experts"]


def test_671b(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight cards with 16 of 128 heads and 32 of 256 experts each, in 8-bit floats. What a token keeps, 512 numbers and
    64 rotated ones, is the same for all heads, and every card has it."""
    found = plan("DeepSeek-V3", capsys, "--devices", "8xH200", "--context", "163840", *AS_STORED)
    low = 7168 * 1536 + 7168 * (512 + 64)  # to the short vectors, of which keys and values have one
    high = 1536 * 128 * (128 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168
    norms, expert = 2 * 7168 + 1536 + 512, 3 * 7168 * 2048
    router = 256 * 7168 + 256
    dense, mixture = 3 * 7168 * 18432, (256 + 1) * expert + router
    total = 2 * 129280 * 7168 + 61 * (low + high + norms) + 3 * dense + 58 * mixture + 7168
    assert found["parameters"] == total == 671_026_419_200
    eight = way(found, 8, experts=True)
    parts = eight["fullest_rank"]["parts"]
    assert parts["embedding"] == parts["head"] == 16160 * 7168 * BF16
    # keys and values are made of 512 numbers by a matrix that is kept in bfloat16
    mine = 1536 * 16 * (128 + 64) + 16 * 128 * 7168
    assert parts["attention"] == 61 * (fp8(low + mine) + 512 * 16 * (128 + 128) * BF16)
    assert parts["experts"] == 58 * fp8(32 * expert)
    assert parts["mlp"] == 3 * fp8(dense // 8) + 58 * (fp8(expert // 8) + 256 * 7168 * BF16 + 256 * F32)
    assert parts["norms"] == (61 * norms + 7168) * F32
    a_token = 61 * (512 + 64) * BF16
    assert parts["keys and values"] == (163840 // 256 + 1) * 256 * a_token
    assert (a_token, eight["sequences"]) == (70_272, 1)
    # plain torch attends: scores of 256 queries of 16 heads, twice, the latents three times, a byte a query of a mask
    assert parts["scores"] == 163840 * ((2 * 16 * 256 + 3 * 576) * F32 + 256)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Llama-3.1-8B-Instruct", 8.03),
        ("Llama-3.3-70B-Instruct", 70.55),
        ("Qwen3-235B-A22B", 235.09),
        ("DeepSeek-V3", 671.03),
    ],
)
def test_totals_are_those_that_were_published(name: str, published: float, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(name, capsys, "--devices", "1x8GiB", *AS_STORED)
    assert round(found["parameters"] / 1e9, 2) == published


def test_2780b_at_a_million_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """Kimi K3's language model on sixteen cards, each with 6 of 96 heads and 56 of 896 experts of 4 bits, of which 32
    neighbours take 17 bytes. 24 layers attend, and keep 576 numbers of a token; 69 have a state instead, and layers
    mix what groups of earlier ones gave."""
    found = plan("Kimi-K3", capsys, "--devices", "16xB200", "--context", "1048576", *AS_STORED)
    attending = 7168 * (1536 + 576) + 1536 * 96 * 192 + 512 * 96 * (128 + 128) + 2 * 7168 * 96 * 128
    state = 5 * 7168 * 12288 + 7168 * (96 + 128) + 128 * 12288  # q, k, v, gate, output; step sizes; decay
    small = 3 * 12288 * 4 + 96 + 12288  # convolutions, decay
    dense, shared, expert = 3 * 7168 * 33792, 3 * 7168 * 6144, 3 * 3584 * 3072
    router, narrowing = 896 * 7168, 2 * 7168 * 3584
    mixing = (2 * 93 + 1) * 7168
    norms = (2 * 93 + 1 + 187) * 7168 + 69 * 128 + 92 * 3584 + 24 * (1536 + 512)
    mixtures = 92 * (896 * expert + shared + router + 896 + narrowing)
    total = 2 * 163840 * 7168 + 24 * attending + 69 * (state + small) + mixing + dense + mixtures + norms
    assert found["parameters"] == total == 2_779_484_476_000
    # the tower that images go through is not in the plan: 27 layers, patches, positions, projector
    layer = 4 * 1024 * 1536 + 2 * 1024 * 4096 + 2 * 1024
    tower = 27 * layer + 14 * 14 * 3 * 1024 + 64 * 64 * 1024 + 4096 * 4096 + 4096 * 7168
    assert round((total + tower) / 1e9, 1) == 2779.9

    sixteen = way(found, 16, experts=True)
    parts = sixteen["fullest_rank"]["parts"]
    assert parts["embedding"] == parts["head"] == 10240 * 7168 * BF16
    mine = 7168 * (1536 + 576) + 1536 * 6 * 192 + 512 * 6 * (128 + 128) + 2 * 7168 * 6 * 128
    my_state = 5 * 7168 * 768 + 7168 * (6 + 128) + 128 * 768
    assert parts["attention"] == (24 * mine + 69 * my_state + mixing) * BF16 + 69 * (small // 16) * F32
    assert parts["experts"] == 92 * 56 * expert * 17 // 32
    assert parts["mlp"] == (dense // 16 + 92 * (shared // 16 + router + narrowing)) * BF16 + 92 * 896 * F32
    assert parts["norms"] == norms * F32
    a_token = 24 * 576 * BF16
    assert parts["keys and values"] == (2**20 // 256 + 1) * 256 * a_token
    assert a_token * 2**20 == 27 * 2**30
    # inputs of the last three tokens, and 128 x 128 for each head; of one sequence that runs and 32 that are kept
    assert parts["states"] == 33 * 69 * (3 * 3 * 768 + 6 * 128 * 128) * F32
    assert sixteen["sequences"] == 1
