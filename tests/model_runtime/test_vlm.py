"""Every vision family against transformers, from messages with pictures to logits and greedy text, and bit for bit the
same however the engine goes about it: alone, among others, in chunks, with caches cold and warm."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from model_runtime.batch import ImageRows, make_batch
from model_runtime.caches import allocate_caches
from model_runtime.checkpoint import load_model
from model_runtime.device_batch import upload
from model_runtime.images import ImageStore
from model_runtime.ops.registry import select
from scheduler.config import SchedulerConfig
from scheduler.plan import SampleRows, ScoreRows, StepPlan, ints
from scheduler.request import FinishReason, Request
from tests.vision.preprocess_pictures import as_pil, picture
from tests.vlm import make_vlm
from tests.vlm_cases import VLMS
from tests.vlm_engine import Engine, Gateway, Outcome, request
from tests.vlm_oracle import Answer, Messages, Oracle

TOLERANCE = 1e-4
STATES_TOLERANCE = 4e-4
"""Of models with states: through the delta rule, last bits in which matrix units differ from torch grow (1.5e-4)."""
STEPS = 12
PICTURES = [as_pil(picture(*size)) for size in ((60, 100, 0), (40, 33, 1), (97, 56, 3), (100, 90, 6))]


def said(role: str, *parts: str) -> Mapping[str, object]:
    """A message; the part "IMAGE" stands for a picture."""
    return {
        "role": role,
        "content": [{"type": "image"} if part == "IMAGE" else {"type": "text", "text": part} for part in parts],
    }


CONVERSATIONS: Mapping[str, tuple[Messages, list[int]]] = {
    "one": ([said("user", "What is ", "IMAGE", " this?")], [0]),
    "three": (
        [
            said("user", "IMAGE", "and\n", "IMAGE"),
            said("assistant", "Two."),
            said("user", "Now\n\n", "IMAGE", "\n?"),
        ],
        [0, 1, 2],
    ),
    "large": ([said("user", "IMAGE", "Look at the picture above.")], [3]),
}
"""Messages and which pictures they show."""
NEIGHBOURS: tuple[tuple[Messages, list[int]], ...] = (
    ([said("user", "Hello there, no picture at all")], []),
    ([said("user", "IMAGE", "IMAGE", "twice the same?")], [2, 2]),
    ([said("user", "IMAGE", "and the rest of a longer text about it, which goes on for a while.")], [1]),
)


PLAIN_TOO = ("llava-clip", "llava_next", "gemma3", "qwen2_5_vl", "qwen3_vl", "kimi_k25")
"""Computed with plain torch as well; between them they use every operation."""
WITH_STATES = ("qwen3_5",)
UNCUT = ("gemma3", "gemma3-wide-window", "smolvlm")
"""Images that attend in both directions are never cut; spans of one embedding cannot be."""


@dataclass(frozen=True)
class Case:
    """A checkpoint, what transformers answers, and the requests that the gateway makes."""

    name: str
    folder: Path
    answers: Mapping[str, Answer]
    requests: Mapping[str, Request]
    scored: Mapping[str, Request]
    """The same, asking for log-probabilities of the prompt."""
    neighbours: list[Request]


def make_case(folder: Path, name: str) -> Case:
    oracle, gateway = Oracle(name, make_vlm(folder, name)), Gateway(folder)
    prompts = {
        key: gateway.prompt(messages, [PICTURES[index] for index in shown])
        for key, (messages, shown) in CONVERSATIONS.items()
    }
    beside = [gateway.prompt(messages, [PICTURES[index] for index in shown]) for messages, shown in NEIGHBOURS]
    return Case(
        name=name,
        folder=folder,
        answers={
            key: oracle.answer(messages, [PICTURES[index] for index in shown], STEPS)
            for key, (messages, shown) in CONVERSATIONS.items()
        },
        requests={key: request(index, prompt, STEPS) for index, (key, prompt) in enumerate(prompts.items())},
        scored={key: request(index, prompt, STEPS, scored=True) for index, (key, prompt) in enumerate(prompts.items())},
        neighbours=[request(10 + index, prompt, 4 + index) for index, prompt in enumerate(beside)],
    )


@pytest.fixture(scope="module", params=VLMS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp(request.param), request.param)


def engine(case: Case, *, tokens: int = 1024, kernels: str = "auto", sequences: int = 4, **options: int) -> Engine:
    config = SchedulerConfig(max_num_seqs=sequences, max_num_batched_tokens=tokens, block_size=16, prefill_share=1.0)
    return Engine(case.folder, config, kernels=kernels, **options)


def test_prompts_are_those_of_transformers(case: Case) -> None:
    for key, answer in case.answers.items():
        assert list(case.requests[key].prompt_ids) == answer.prompt_ids


def check_logits(case: Case, kernels: str) -> None:
    runtime = engine(case, kernels=kernels)
    for key, answer in case.answers.items():
        outcome, logits_LV = runtime.logits_of(case.scored[key])
        assert outcome.finish_reason is FinishReason.LENGTH and outcome.cached_tokens == 0
        assert outcome.token_ids == answer.continuation
        # the last token was chosen and not computed
        expected_LV = answer.logits_LV[:-1]
        assert logits_LV.shape == expected_LV.shape
        limit = STATES_TOLERANCE if case.name in WITH_STATES else TOLERANCE
        assert (logits_LV - expected_LV).abs().max().item() <= limit


def test_logits_and_greedy_text_are_those_of_transformers(case: Case) -> None:
    for kernels in ("auto", "reference") if case.name in PLAIN_TOO else ("auto",):
        check_logits(case, kernels)


def test_images_and_text_meet_on_one_device(case: Case) -> None:
    """On torch's device without memory, where numbers of two devices may not meet, with the operations of a GPU."""
    device = torch.device("meta")
    model = load_model(case.folder, select("cuda"), device, lambda fraction: None)
    model.decoder.dtype = torch.bfloat16
    assert model.vision is not None
    store = ImageStore(model.vision.encoder, model.vision.table_CV, device)
    image = case.requests["one"].images.images[0]
    assert image.pixels is not None
    (features,) = model.vision.encoder.encode([store._input(image.pixels)])
    count = len(features.embeddings_NO)
    assert count == image.num_embeddings
    plan = StepPlan(
        step_id=0,
        token_ids=ints([0] * count),
        query_lens=ints([count]),
        kv_lens=ints([count]),
        block_tables=ints([0]),
        rope_positions=ints([0] * 3 * count) if model.config.rope.mrope_sections else ints(),
        sample=SampleRows(),
        score=ScoreRows(),
    )
    rows = ImageRows(start=0, embeddings_NC=features.embeddings_NO, deepstack_NC=features.deepstack_NO)
    if model.config.delta is not None:  # states are in the memory of the machine
        return
    kv = allocate_caches(model.config, 1, 256, torch.bfloat16, device)
    batch = make_batch(plan, 256, images=(rows,))
    if model.config.experts is None:  # whose router asks who has tokens
        assert model.decoder.forward(upload(batch, device), kv).device == device


def shared_blocks(case: Case, common: int) -> int:
    """Tokens that a text finds which begins as one before did, but for a model with states, which has kept none where
    two texts part for the first time."""
    return 0 if case.name in WITH_STATES else common // 16 * 16


def visible(outcome: Outcome) -> tuple[object, ...]:
    return (outcome.token_ids, outcome.logprobs, outcome.prompt_logprobs, outcome.finish_reason)


def alone(case: Case, requests: Mapping[str, Request]) -> dict[str, tuple[object, ...]]:
    """Each in an engine of its own."""
    return {key: visible(engine(case).run([one])[one.seq_id]) for key, one in requests.items()}


def test_neighbours_and_chunks_change_no_bit(case: Case) -> None:
    """Among others in steps of 1024, 40 and 7 tokens, the last of which cut images wherever the model allows it."""
    expected = alone(case, case.scored)
    for tokens in (1024, 40, 7):
        runtime = engine(case, tokens=tokens)
        outcomes = runtime.run([*case.neighbours[:2], *case.scored.values(), *case.neighbours[2:]])
        for key, one in case.scored.items():
            assert visible(outcomes[one.seq_id]) == expected[key], f"{key} in steps of {tokens}"
        assert runtime.largest_batch >= (4 if tokens == 1024 else 2)
    assert (runtime.num_cut_spans > 0) == (case.name not in UNCUT)


def test_caches_change_no_bit(case: Case) -> None:
    """Asked again: prompt from the prefix cache, and with the pictures' embeddings gone or still there."""
    expected = alone(case, case.requests)
    largest = max(image.num_embeddings for one in case.requests.values() for image in one.images.images)
    runtime = engine(case, sequences=2, tokens=24)
    tight = engine(case, sequences=2, tokens=24, encoder_cache_bytes=largest * runtime.info.bytes_per_embedding)
    for each in (runtime, tight):
        for turn in range(3):
            outcomes = each.run([*case.requests.values(), *(case.neighbours if turn == 1 else [])])
            for key, one in case.requests.items():
                assert visible(outcomes[one.seq_id]) == expected[key], f"{key}, time {turn}"
                if turn:
                    assert outcomes[one.seq_id].cached_tokens == (len(one.prompt_ids) - 1) // 16 * 16


def test_another_picture_of_the_same_size_is_another_question(case: Case) -> None:
    """A, A, B, A: the cache gives all, then what stands before the picture, then all."""
    gateway, (messages, _) = Gateway(case.folder), CONVERSATIONS["one"]
    first, second = PICTURES[0], as_pil(picture(60, 100, 3))
    questions = [
        request(index, gateway.prompt(messages, [shown]), STEPS) for index, shown in enumerate((first, second))
    ]
    runtime = engine(case)
    outcomes = [runtime.run([questions[index]])[index] for index in (0, 0, 1, 0)]
    texts = [outcome.token_ids for outcome in outcomes]
    assert texts[0] == texts[1] == texts[3] != texts[2]
    before, length = questions[0].images.spans[0].offset, len(questions[0].prompt_ids)
    all_blocks = (length - 1) // 16 * 16
    assert [outcome.cached_tokens for outcome in outcomes] == [0, all_blocks, shared_blocks(case, before), all_blocks]
    assert all_blocks > before
    assert runtime.num_jobs == 2


def test_another_question_about_the_same_picture(case: Case) -> None:
    """The second shares all blocks up to where the texts part, which may be the middle of the picture."""
    gateway = Gateway(case.folder)
    texts = (" this?", " done with that, do you know?")
    prompts = [gateway.prompt([said("user", "Tell me what ", "IMAGE", text)], PICTURES[:1]) for text in texts]
    first, second = (request(index, prompt, STEPS) for index, prompt in enumerate(prompts))
    expected = visible(engine(case).run([second])[1])
    runtime = engine(case)
    runtime.run([first])
    outcome = runtime.run([second])[1]
    assert visible(outcome) == expected
    pairs = zip(first.prompt_ids, second.prompt_ids, strict=False)
    common = next(index for index, (one, other) in enumerate(pairs) if one != other)
    assert outcome.cached_tokens == shared_blocks(case, common)
    span = second.images.spans[0]
    if case.name.startswith("gemma3"):
        assert span.offset < outcome.cached_tokens < span.offset + span.length
