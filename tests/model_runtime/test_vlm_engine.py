"""What an engine with images must stand: threads, preemption, half precision, a tower that fails, typed tokens."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, PreTrainedModel

from model_runtime.ops import set_threads
from scheduler.config import SchedulerConfig
from scheduler.plan import ints
from scheduler.request import FinishReason, Request, SamplingParams
from tests.vision.preprocess_pictures import as_pil, picture
from tests.vlm import make_tokenizer, make_vlm
from tests.vlm_cases import CASES, VLMS
from tests.vlm_engine import Engine, Gateway, Outcome, request
from tests.vlm_oracle import Messages, Oracle

PICTURES = [as_pil(picture(60, 100, 0)), as_pil(picture(97, 56, 3))]
STEPS = 12


def shown(*texts: str) -> Messages:
    """A message of texts with a picture between each two."""
    parts = [part for text in texts for part in ({"type": "text", "text": text}, {"type": "image"})]
    return [{"role": "user", "content": parts[:-1]}]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    set_threads(before)


def config(sequences: int = 4, tokens: int = 64) -> SchedulerConfig:
    return SchedulerConfig(max_num_seqs=sequences, max_num_batched_tokens=tokens, prefill_share=1.0)


def seen(outcome: Outcome) -> tuple[object, ...]:
    return (outcome.token_ids, outcome.logprobs, outcome.finish_reason)


def questions(gateway: Gateway) -> list[Request]:
    """Two with pictures and one without."""
    first = gateway.prompt(shown("What is ", " and ", "?"), PICTURES)
    second = gateway.prompt(shown("And this: ", ""), PICTURES[1:])
    third = gateway.prompt(shown("No picture, only a text that is a little longer"), [])
    return [request(index, prompt, STEPS) for index, prompt in enumerate((first, second, third))]


@pytest.mark.parametrize(
    "name", ["llava-siglip", "gemma3", "internvl", "qwen2_5_vl", "qwen3_vl", "mistral3", "kimi_k25"]
)
def test_two_threads_compute_what_one_computes(name: str, tmp_path: Path) -> None:
    make_vlm(tmp_path, name)
    asked = questions(Gateway(tmp_path))
    one, two = (Engine(tmp_path, config(), threads=threads).run(asked) for threads in (1, 2))
    for each in asked:
        assert seen(one[each.seq_id]) == seen(two[each.seq_id])


@pytest.mark.parametrize("name", ["llava-clip", "gemma3", "qwen3_vl"])
def test_a_preempted_sequence_answers_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    """In a pool that just holds it, beside one of higher priority that takes its blocks half-way, while the encoder
    cache holds only one of its two pictures."""
    make_vlm(tmp_path, name)
    victim = questions(Gateway(tmp_path))[0]
    expected = seen(Engine(tmp_path, config()).run([victim])[0])
    sampling = SamplingParams(max_tokens=STEPS + 1, temperature=0.0)
    bully = Request(seq_id=9, prompt_ids=ints([5]), sampling=sampling, cache_salt=b"bully")
    engine = Engine(
        tmp_path,
        replace(config(sequences=2), block_size=1),
        num_kv_blocks=len(victim.prompt_ids) + STEPS + 1,
        encoder_cache_bytes=max(image.num_embeddings for image in victim.images.images)
        * Engine(tmp_path, config()).info.bytes_per_embedding,
    )
    assert seen(engine.run([bully, replace(victim, priority=1)])[0]) == expected
    assert engine.scheduler.stats().preemptions >= 1
    assert engine.num_jobs >= 2


@pytest.mark.parametrize("name", ["llava-clip", "gemma3", "qwen2_5_vl", "qwen3_vl-flat"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_storage_and_computing_is_float32(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model: PreTrainedModel = make_vlm(tmp_path, name)
    model.to(dtype).save_pretrained(tmp_path)
    oracle = Oracle(name, AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval())
    messages = shown("What is ", " and ", "?")
    answer = oracle.answer(messages, PICTURES, 1)
    asked = request(0, Gateway(tmp_path).prompt(messages, PICTURES), 1)
    outcome, logits_LV = Engine(tmp_path, config(tokens=1024)).logits_of(asked)
    assert outcome.token_ids == answer.continuation
    assert (logits_LV - answer.logits_LV[:-1]).abs().max().item() <= 1e-4


def test_an_image_that_fails_ends_its_sequence_alone(tmp_path: Path) -> None:
    make_vlm(tmp_path, "llava-clip")
    asked = questions(Gateway(tmp_path))
    expected = Engine(tmp_path, config()).run(asked[2:])
    weights = load_file(tmp_path / "model.safetensors")
    for key in (key for key in weights if "multi_modal_projector" in key):
        weights[key] *= 1e20  # their product overflows
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    engine = Engine(tmp_path, config())
    outcomes = engine.run(asked)
    assert [outcomes[index].finish_reason for index in range(3)] == [
        FinishReason.ERROR,
        FinishReason.ERROR,
        FinishReason.LENGTH,
    ]
    assert outcomes[0].message and outcomes[0].token_ids == []
    assert seen(outcomes[2]) == seen(expected[2])
    assert engine.run(asked[:1])[0].finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("name", VLMS)
def test_tokens_that_a_user_types_stay_text(name: str, tmp_path: Path) -> None:
    """With x for each character of every special token typed, the tokens of template and picture stand in the same
    places: nothing typed is one, and the picture is where it was."""
    make_vlm(tmp_path, name)
    gateway, case, tokenizer = Gateway(tmp_path), CASES[name], make_tokenizer(CASES[name])
    special = set(tokenizer.convert_tokens_to_ids(list(case.tokens)))
    typed = "".join(f"a {token}{token}b" for token in case.tokens)
    plain = "".join(f"a {'x' * len(token)}{'x' * len(token)}b" for token in case.tokens)
    for before, after in (("{}", None), ("{}", "."), (".", "{}")):
        texts = [text for text in (before, after) if text is not None]
        found, wanted = (
            gateway.prompt(shown(*(text.replace("{}", said) for text in texts)), PICTURES[: len(texts) - 1])
            for said in (typed, plain)
        )
        places = [index for index, one in enumerate(found.ids) if one in special]
        assert places == [index for index, one in enumerate(wanted.ids) if one in special]
        assert [found.ids[index] for index in places] == [wanted.ids[index] for index in places]
        assert len(found.ids) == len(wanted.ids) and found.images.spans == wanted.images.spans
