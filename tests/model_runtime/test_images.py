"""The store of embeddings between steps, and the runner with it: what is encoded, kept, read, dropped, and refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_runtime.batch import Batch, ImageRows, make_batch
from model_runtime.caches import Caches
from model_runtime.images import ImageStore, TowerKernels
from model_runtime.memory.images import encode_bytes
from model_runtime.ops import load_ops
from model_runtime.parallel import Alone, Collectives
from model_runtime.runner import Runner
from scheduler.plan import ImageJobs, ImagePixels, ImageSpans, SampleRows, ScoreRows, StepPlan, ints
from tests.model_runtime.memory import measured_bytes
from tests.model_runtime.ranks import on_threads
from tests.vision.towers import QWEN3, TEXT_HIDDEN_SIZE, make_encoder, make_model
from vision.encoder.inputs import image_input
from vision.encoder.model import ImageEncoder, ImageFeatures, ImageInput

CPU = torch.device("cpu")
OPS = load_ops(CPU, "reference")
COMPILED = TowerKernels(load_ops(CPU, "auto"))  # an image is the same bit for bit alone and among others
TABLE = torch.linspace(-2, 2, 3 * 256).view(3, 256)
SIDE = 12
COUNT = 9  # embeddings of one tile of the small LLaVA
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
LLAVA = {
    "model_type": "llava",
    "vision_config": {"model_type": "clip_vision_model", **SMALL, "image_size": SIDE, "patch_size": 4},
}
QWEN3_VL = {"model_type": "qwen3_vl", "vision_config": QWEN3}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> ImageEncoder:
    return make_encoder(make_model(LLAVA, "llama"), tmp_path_factory.mktemp("llava"), COMPILED)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> ImageEncoder:
    return make_encoder(make_model(QWEN3_VL, "qwen3_vl_text"), tmp_path_factory.mktemp("qwen3"), COMPILED)


@pytest.fixture
def store(llava: ImageEncoder) -> ImageStore:
    return ImageStore(llava, TABLE, CPU)


def pixels(seed: int, height: int = SIDE, width: int = SIDE, tiles: int = 1) -> ImagePixels:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (tiles, height, width, 3), generator=generator, dtype=torch.uint8)
    return ImagePixels(
        data=bytes(data.flatten().tolist()),
        tiles=tiles,
        height=height,
        width=width,
        rows=0,
        cols=0,
        image_height=height,
        image_width=width,
    )


def embeddings(encoder: ImageEncoder, image: ImagePixels) -> tuple[Tensor, ...]:
    """What the encoder makes of an image, and its deepstack levels."""
    tiles = torch.frombuffer(bytearray(image.data), dtype=torch.uint8).view(image.tiles, image.height, image.width, 3)
    given = image_input(
        encoder.config, TABLE, tiles, rows=0, cols=0, image_height=image.height, image_width=image.width
    )
    features = encoder.encode([given])[0]
    return features.embeddings_NO, *features.deepstack_NO


def plan(
    jobs: dict[int, tuple[ImagePixels, int]], spans: list[tuple[int, int, int, int]], drop: list[int], tokens: int = 30
) -> StepPlan:
    """Jobs by slot with the number of embeddings expected; spans as (row, length, slot, first)."""
    rows, lengths, slots, firsts = (ints([span[column] for span in spans]) for column in range(4))
    starts = ints([row - first for row, _, _, first in spans])
    return StepPlan(
        step_id=3,
        token_ids=ints([1] * tokens),
        query_lens=ints([tokens]),
        kv_lens=ints([tokens]),
        block_tables=ints(list(range(-(-tokens // 4)))),
        sample=SampleRows(),
        score=ScoreRows(),
        drop_slots=ints(drop),
        encode=ImageJobs(
            slots=ints(list(jobs)),
            num_embeddings=ints([count for _, count in jobs.values()]),
            pixels=tuple(image for image, _ in jobs.values()),
        ),
        images=ImageSpans(
            rows=rows,
            lengths=lengths,
            slots=slots,
            firsts=firsts,
            starts=starts,
            ends=ints([start + COUNT for start in starts]),
        ),
    )


def test_rows_are_the_embeddings_that_the_spans_name(store: ImageStore, llava: ImageEncoder) -> None:
    one, two = pixels(1), pixels(2)
    jobs = {4: (one, COUNT), 0: (two, COUNT)}
    rows, failed = store.step(plan(jobs, [(2, 9, 0, 0), (12, 3, 4, 0), (20, 2, 4, 7)], []))
    assert not failed
    assert [row.start for row in rows] == [2, 12, 20]
    expected_one, expected_two = embeddings(llava, one)[0], embeddings(llava, two)[0]
    assert expected_one.shape == (COUNT, TEXT_HIDDEN_SIZE)
    assert torch.equal(rows[0].embeddings_NC, expected_two)
    assert torch.equal(rows[1].embeddings_NC, expected_one[:3])
    assert torch.equal(rows[2].embeddings_NC, expected_one[7:])
    assert [row.deepstack_NC for row in rows] == [(), (), ()]


class Counting(ImageEncoder):
    """An encoder that remembers how many images it was given at once."""

    def __init__(self, encoder: ImageEncoder, groups: list[int]) -> None:
        self.config, self._made, self._groups = encoder.config, encoder, groups

    def encode(self, images: Sequence[ImageInput]) -> list[ImageFeatures]:
        self._groups.append(len(images))
        return self._made.encode(images)


def test_small_images_of_a_step_are_encoded_together_and_a_large_one_alone(qwen3: ImageEncoder) -> None:
    """1024 patches of 4 x 4 pixels are the most together."""
    groups: list[int] = []
    sides = [(64, 128), (32, 128), (64, 64), (8, 8), (160, 128), (8, 8), (8, 8)]
    jobs = {slot: (pixels(slot, *side), side[0] * side[1] // 64) for slot, side in enumerate(sides)}
    store = ImageStore(Counting(qwen3, groups), TABLE, CPU)
    _, failed = store.step(plan(jobs, [], []))
    assert not failed and groups == [3, 1, 1, 2]
    spans = [(4 * index, 1, index, 0) for index in range(len(sides))]
    rows, _ = store.step(plan({}, spans, []))
    for row, (image, _) in zip(rows, jobs.values(), strict=True):
        assert torch.equal(row.embeddings_NC, embeddings(qwen3, image)[0][:1])


def test_embeddings_stay_until_they_are_dropped_and_their_slot_is_taken_again(
    store: ImageStore, llava: ImageEncoder
) -> None:
    store.step(plan({4: (pixels(1), COUNT)}, [], []))
    (row,), _ = store.step(plan({}, [(0, 4, 4, 5)], []))
    assert torch.equal(row.embeddings_NC, embeddings(llava, pixels(1))[0][5:])
    (row,), _ = store.step(plan({4: (pixels(2), COUNT)}, [(0, 4, 4, 5)], [4]))
    assert torch.equal(row.embeddings_NC, embeddings(llava, pixels(2))[0][5:])


def test_levels_come_with_the_embeddings(qwen3: ImageEncoder) -> None:
    image = pixels(1, 24, 16)
    (row,), failed = ImageStore(qwen3, TABLE, CPU).step(plan({0: (image, 6)}, [(3, 4, 0, 1)], []))
    assert not failed
    levels = embeddings(qwen3, image)
    assert len(levels) == 3
    assert torch.equal(row.embeddings_NC, levels[0][1:5])
    assert all(torch.equal(row.deepstack_NC[index], levels[1 + index][1:5]) for index in range(2))


def test_ranks_divide_images_and_all_have_the_embeddings(qwen3: ImageEncoder) -> None:
    """Bit for bit those of one rank; an image that fails does so on every rank, and the next ones do not."""
    table = TABLE.clone()
    table[1, 7] = float("inf")
    bad = replace(pixels(1, 16, 16), data=bytes([7] * (16 * 16 * 3)))
    sizes = {3: (24, 16), 0: (24, 16), 2: (16, 16), 5: (8, 8), 7: (8, 16)}
    images = {slot: pixels(slot, *size) for slot, size in sizes.items()}
    good = {slot: replace(image, data=image.data.replace(b"\7", b"\10")) for slot, image in images.items()}
    jobs = {slot: (image, image.num_pixels // 64) for slot, image in good.items()}
    jobs |= {1: (bad, 4), 6: (good[5], 2), 8: (good[3], 6)}
    step = plan(jobs, [(4 * index, 1, slot, 0) for index, slot in enumerate(jobs)], [], tokens=60)
    expected, failed = ImageStore(qwen3, table, CPU).step(step)
    assert list(failed) == [1, 6]

    def one(collectives: Collectives) -> list[ImageRows]:
        counted: list[int] = []
        rows, failed = ImageStore(Counting(qwen3, counted), table, CPU, (collectives, Alone())).step(step)
        assert list(failed) == [1, 6] and sum(counted) == 4
        return list(rows)

    for rows in on_threads(2, one):
        for row, alone in zip(rows, expected, strict=True):
            assert row.start == alone.start and torch.equal(row.embeddings_NC, alone.embeddings_NC)
            assert all(map(torch.equal, row.deepstack_NC, alone.deepstack_NC))
            assert len(row.deepstack_NC) == 2


@pytest.mark.parametrize("wrong", ["count", "numbers"])
def test_an_image_that_fails_fails_alone(wrong: str, qwen3: ImageEncoder) -> None:
    table = TABLE.clone()
    table[1, 7] = float("inf") if wrong == "numbers" else 0.0
    store = ImageStore(qwen3, table, CPU)
    bad = replace(pixels(1, 16, 16), data=bytes([7] * (16 * 16 * 3)))
    good = replace(bad, data=bytes([9] * (16 * 16 * 3)))
    jobs = {1: (good, 4), 2: (bad, 5 if wrong == "count" else 4)}
    rows, failed = store.step(plan(jobs, [(0, 4, 1, 0), (6, 3, 2, 1)], []))
    assert list(failed) == [2]
    assert rows[0].embeddings_NC.isfinite().all()
    assert torch.equal(rows[1].embeddings_NC, torch.zeros(3, TEXT_HIDDEN_SIZE))
    assert [level.abs().sum() for level in rows[1].deepstack_NC] == [0, 0]
    with pytest.raises(AssertionError, match="slot 2 is read and holds no image"):
        store.step(plan({}, [(6, 3, 2, 1)], []))
    (row,), failed = store.step(plan({2: (good, 4)}, [(0, 4, 2, 0)], []))
    assert not failed
    assert torch.equal(row.embeddings_NC, rows[0].embeddings_NC)


def test_contradicting_plans_are_refused(store: ImageStore) -> None:
    store.step(plan({0: (pixels(1), COUNT)}, [], []))
    with pytest.raises(AssertionError, match="slot 5 is read and holds no image"):
        store.step(plan({}, [(0, 1, 5, 0)], []))
    with pytest.raises(AssertionError, match="slot 5 is dropped and holds no image"):
        store.step(plan({}, [], [5]))
    with pytest.raises(AssertionError, match="slot 0 is encoded while it holds an image"):
        store.step(plan({0: (pixels(1), COUNT)}, [], []))
    with pytest.raises(AssertionError, match=r"embeddings 8 \.\. 10 of 9"):
        store.step(plan({}, [(0, 2, 0, 8)], []))
    with pytest.raises(AssertionError, match="431 bytes of an image of 144 pixels"):
        store.step(plan({1: (replace(pixels(1), data=bytes(431)), COUNT)}, [], []))


class Recorder:
    """A model that keeps what it was given."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def forward(self, batch: Batch, kv: Caches) -> Tensor:
        self.batches.append(batch)
        return torch.zeros(batch.num_tokens, 1)

    def logits(self, hidden_RC: Tensor) -> Tensor:
        return hidden_RC


def test_the_runner_gives_the_model_its_images(store: ImageStore) -> None:
    model = Recorder()
    jobs = {0: (pixels(1), COUNT), 1: (pixels(2), COUNT + 1)}
    result = Runner(model, [], 4, OPS, images=store).run(plan(jobs, [(2, COUNT, 0, 0)], []))
    assert list(result.failed_slots) == [1]
    (row,) = model.batches[0].images
    assert (row.start, len(row.embeddings_NC)) == (2, COUNT)
    assert model.batches[0].rope_positions_T3 is None


def test_a_model_of_text_alone_is_given_no_images() -> None:
    runner = Runner(Recorder(), [], 4, OPS)
    assert list(runner.run(plan({}, [], [])).failed_slots) == []
    for wrong in (plan({0: (pixels(1), COUNT)}, [], []), plan({}, [(0, 1, 0, 0)], []), plan({}, [], [0])):
        with pytest.raises(AssertionError, match="a plan with images, a model without"):
            runner.run(wrong)


def test_rope_positions_are_those_of_the_plan() -> None:
    given = plan({}, [], [], tokens=3)
    batch = make_batch(replace(given, rope_positions=ints([1, 2, 3, 4, 5, 6, 7, 8, 9])), 4)
    assert batch.rope_positions_T3 is not None
    assert batch.rope_positions_T3.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    with pytest.raises(AssertionError, match="three a token"):
        make_batch(replace(given, rope_positions=ints([1, 2, 3])), 4)


# Memory

WIDE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SIGLIP = {"model_type": "siglip_vision_model", **WIDE, "image_size": 112, "patch_size": 7, "vision_use_head": False}
PIXTRAL = {"model_type": "pixtral", **WIDE, "image_size": 512, "patch_size": 8}
QWEN2 = {"depth": 2, "embed_dim": 64, "num_heads": 4, "hidden_size": 24, "mlp_ratio": 4, "patch_size": 8}
TOWERS: dict[str, tuple[dict[str, object], str, ImagePixels]] = {
    "one tile": (
        {"model_type": "gemma3", "vision_config": SIGLIP, "mm_tokens_per_image": 16},
        "gemma3_text",
        pixels(1, 112, 112),
    ),
    "many tiles": (
        {"model_type": "idefics3", "vision_config": {**WIDE, "image_size": 112, "patch_size": 7}, "scale_factor": 4},
        "llama",
        pixels(1, 112, 112, tiles=13),
    ),
    "packed": ({"model_type": "qwen2_vl", "vision_config": QWEN2}, "qwen2_vl_text", pixels(1, 320, 384)),
    "gated": ({"model_type": "mistral3", "vision_config": PIXTRAL}, "mistral", pixels(1, 320, 384)),
}


@pytest.mark.parametrize("name", TOWERS)
def test_encoding_takes_the_memory_that_is_planned(name: str, tmp_path: Path) -> None:
    """Within an eighth."""
    config, text, image = TOWERS[name]
    encoder = make_encoder(make_model(config, text), tmp_path, COMPILED)
    store, step = ImageStore(encoder, TABLE, CPU), plan({0: (image, 0)}, [], [])
    peak, _ = measured_bytes(lambda: store.step(step))
    assert peak == pytest.approx(encode_bytes(encoder.config, image.num_pixels), rel=0.125)
