"""What is whose: every head, column and token belongs to a rank, and ranks have equal work."""

from dataclasses import replace

import pytest

from model_runtime.architecture import ModelConfig
from model_runtime.memory.budget import PlanError
from model_runtime.share import Axis, Part, Share, split, whole_experts_of
from tests.model_runtime.deepseek import EXPERTS
from tests.model_runtime.memory import MODEL

SMOLLM2 = replace(
    MODEL, vocab_size=49152, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64
)
LLAMA = replace(
    MODEL, vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_heads=32, num_kv_heads=8, head_dim=128
)
MIXTURE = replace(MODEL, num_kv_heads=4, experts=replace(EXPERTS, intermediate_size=96, shared_size=9))
NARROW = replace(MIXTURE, experts=replace(EXPERTS, shared_size=9), num_heads=9, num_kv_heads=9)


def parts(shares: tuple[Share, ...], axis: Axis) -> list[tuple[int, int]]:
    found = [share.part(axis) for share in shares]
    assert {part.total for part in found} == {found[0].total}
    return [(part.start, part.stop) for part in found]


@pytest.mark.parametrize(
    ("config", "size", "heads", "kv_heads"),
    [
        (SMOLLM2, 1, [(0, 9)], [(0, 3)]),
        (SMOLLM2, 2, [(0, 5), (5, 9)], [(0, 2), (1, 3)]),
        (replace(SMOLLM2, head_dim=80), 2, [(0, 6), (6, 9)], [(0, 2), (2, 3)]),
        (SMOLLM2, 3, [(0, 3), (3, 6), (6, 9)], [(0, 1), (1, 2), (2, 3)]),
        (SMOLLM2, 4, [(0, 2), (2, 3), (3, 6), (6, 9)], [(0, 1), (0, 1), (1, 2), (2, 3)]),
        (LLAMA, 3, [(0, 12), (12, 24), (24, 32)], [(0, 3), (3, 6), (6, 8)]),
        (replace(LLAMA, num_heads=16, num_kv_heads=4), 3, [(0, 6), (6, 11), (11, 16)], [(0, 2), (1, 3), (2, 4)]),
        (LLAMA, 8, [(4 * r, 4 * r + 4) for r in range(8)], [(r, r + 1) for r in range(8)]),
        (LLAMA, 16, [(2 * r, 2 * r + 2) for r in range(16)], [(r // 2, r // 2 + 1) for r in range(16)]),
    ],
)
def test_groups_of_heads_are_cut_only_where_that_leaves_less_to_the_busiest_rank(
    config: ModelConfig, size: int, heads: list[tuple[int, int]], kv_heads: list[tuple[int, int]]
) -> None:
    shares = split(config, size)
    assert [(share.rank, share.size) for share in shares] == [(rank, size) for rank in range(size)]
    assert parts(shares, "heads") == heads
    assert parts(shares, "kv_heads") == kv_heads


@pytest.mark.parametrize("config", [SMOLLM2, LLAMA, MIXTURE])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_everything_belongs_to_one_rank(config: ModelConfig, size: int) -> None:
    shares = split(config, size)
    experts = config.experts
    totals: dict[Axis, int] = {
        "heads": config.num_heads,
        "feed_forward": config.intermediate_size,
        "vocabulary": config.vocab_size,
    }
    if experts is not None:
        totals |= {"expert": experts.intermediate_size, "shared": experts.shared_size}
    for axis, total in totals.items():
        found = parts(shares, axis)
        assert [0, *(stop for _, stop in found)] == [*(start for start, _ in found), total]
        assert all(start < stop for start, stop in found)
    for share in shares:
        own = share.narrowed(config)
        group = config.num_heads // config.num_kv_heads
        assert own.num_heads + sum(own.absent_heads) == own.num_kv_heads * group
        assert all(0 <= absent < group for absent in own.absent_heads)
        assert (own.hidden_size, own.head_dim) == (config.hidden_size, config.head_dim)
    assert shares == split(config, size)


def test_blocks_of_integers_and_panels_are_not_cut() -> None:
    for size in (2, 3, 5):
        for share in split(replace(SMOLLM2, num_heads=15, num_kv_heads=15), size):
            assert share.feed_forward.start % 32 == share.feed_forward.stop % 32 == 0
            assert share.vocabulary.start % 16 == share.vocabulary.stop % 16 == 0
    assert parts(split(replace(MODEL, intermediate_size=40), 2), "feed_forward") == [(0, 20), (20, 40)]


def test_columns_are_divided_evenly_whoever_has_more_heads() -> None:
    assert [share.feed_forward.count for share in split(SMOLLM2, 2)] == [768, 768]
    assert [share.feed_forward.count for share in split(SMOLLM2, 5)] == [320, 320, 320, 288, 288]
    assert [share.feed_forward.count for share in split(LLAMA, 4)] == [3584] * 4


def test_whole_experts_of_ranks_that_share_no_layers() -> None:
    parts = whole_experts_of(MIXTURE, 5)
    assert [(part.start, part.stop) for part in parts] == [(0, 3), (3, 6), (6, 8), (8, 10), (10, 12)]
    with pytest.raises(PlanError, match="12 experts cannot be divided among 13 ranks"):
        whole_experts_of(MIXTURE, 13)
    with pytest.raises(PlanError, match="the model has no experts"):
        whole_experts_of(MODEL, 2)


def test_whole_experts() -> None:
    shares = split(MIXTURE, 3, whole_experts=True)
    assert [(share.experts.start, share.experts.stop) for share in shares] == [(0, 4), (4, 8), (8, 12)]
    assert {(share.expert.start, share.expert.stop) for share in shares} == {(0, 96)}
    assert parts(shares, "shared")[-1][1] == 9
    five_heads = replace(MIXTURE, num_kv_heads=1, num_heads=5, experts=replace(EXPERTS, shared_size=16))
    five = split(five_heads, 5, whole_experts=True)
    assert [share.experts.count for share in five] == [3, 3, 2, 2, 2]
    assert five[0].shared.count <= five[4].shared.count
    with pytest.raises(PlanError, match="heads that are normalised together cannot be divided among 3 ranks"):
        split(replace(MODEL, qk_norm="row"), 3)
    with pytest.raises(PlanError, match="the model has no experts"):
        split(MODEL, 2, whole_experts=True)
    with pytest.raises(PlanError, match="12 experts cannot be divided among 13 ranks"):
        split(replace(five_heads, num_heads=16, num_kv_heads=16), 13, whole_experts=True)


def test_a_part_of_wider_units() -> None:
    assert Part(2, 3, 3).of(192) == slice(128, 192)
    with pytest.raises(AssertionError, match="100 do not divide into 3 units"):
        Part(2, 3, 3).of(100)


@pytest.mark.parametrize(
    ("config", "size", "words"),
    [
        (SMOLLM2, 10, "9 query heads cannot be divided among 10 ranks"),
        (replace(LLAMA, intermediate_size=3), 4, "3 columns cannot"),
        (replace(LLAMA, vocab_size=3), 4, "3 tokens"),
        (replace(MIXTURE, num_heads=16, num_kv_heads=16), 10, "9 columns of shared experts"),
        (
            replace(MIXTURE, experts=replace(EXPERTS, shared_size=9), num_heads=9, num_kv_heads=9),
            9,
            "8 columns of an expert",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(config: ModelConfig, size: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        split(config, size)
