"""An adapter changes what requests with images get, as if it were merged into the model, and no bit of other ones."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from model_runtime.architecture import Adapter
from model_runtime.opening import open_checkpoint
from model_runtime.weights.adapter import read_adapter
from model_runtime.weights.errors import CheckpointError
from scheduler.config import SchedulerConfig, SpeculativeConfig
from scheduler.plan import ints
from scheduler.request import Request, SamplingParams
from tests.adapters import write_adapter
from tests.checkpoints import make_checkpoint
from tests.vision.preprocess_pictures import as_pil, picture
from tests.vlm import make_vlm
from tests.vlm_engine import Engine, Gateway, Outcome, request
from tests.vlm_oracle import Messages, Oracle

NAME, STEPS = "llava-siglip", 10
PICTURES = [as_pil(picture(60, 100, 0)), as_pil(picture(97, 56, 3))]
SYSTEM = {"role": "system", "content": [{"type": "text", "text": "A beginning that all of these texts have alike."}]}
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=40, block_size=8, prefill_share=1.0)
FOUND: Mapping[str, object] = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["v_proj", "q_proj"]}


def shown(text: str, *, image: bool = True) -> Messages:
    content = [{"type": "text", "text": text}, *([{"type": "image"}] if image else [])]
    return [SYSTEM, {"role": "user", "content": content}]


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("adapted")
    model = make_vlm(folder, NAME)
    write_adapter(folder, model)
    return folder, model


@pytest.fixture(scope="module")
def folder(merged: tuple[Path, PreTrainedModel]) -> Path:
    return merged[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint without its adapter."""
    folder = tmp_path_factory.mktemp("plain")
    make_vlm(folder, NAME)
    return folder


def asked(folder: Path) -> list[Request]:
    """With a picture, without, with another one, without."""
    gateway = Gateway(folder)
    prompts = [
        gateway.prompt(shown("What is this?"), PICTURES[:1]),
        gateway.prompt(shown("No picture, only a text.", image=False), []),
        gateway.prompt(shown("And that: "), PICTURES[1:]),
        gateway.prompt(shown("Another text", image=False), []),
    ]
    return [request(index, prompt, STEPS) for index, prompt in enumerate(prompts)]


def seen(outcome: Outcome) -> tuple[object, ...]:
    return (outcome.token_ids, outcome.logprobs, outcome.finish_reason)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_answers_about_pictures_are_those_of_the_merged_model(
    merged: tuple[Path, PreTrainedModel], kernels: str
) -> None:
    folder, model = merged
    answer = Oracle(NAME, model).answer(shown("What is this?"), PICTURES[:1], STEPS)
    outcome, logits_LV = Engine(folder, CONFIG, kernels=kernels).logits_of(asked(folder)[0])
    assert outcome.token_ids == answer.continuation
    assert (logits_LV - answer.logits_LV[:-1]).abs().max().item() <= 1e-4


def test_texts_are_those_of_the_model_without_it_bit_for_bit(folder: Path, plain: Path) -> None:
    """In one batch with requests that have pictures, which all answer as alone."""
    requests = asked(folder)
    engine = Engine(folder, CONFIG)
    found = engine.run(requests)
    assert engine.largest_batch == 4
    for one in requests[1::2]:
        assert seen(found[one.seq_id]) == seen(Engine(plain, CONFIG).run([one])[one.seq_id])
    for one in requests[::2]:
        assert seen(found[one.seq_id]) == seen(Engine(folder, CONFIG).run([one])[one.seq_id])
        assert seen(found[one.seq_id]) != seen(Engine(plain, CONFIG).run([one])[one.seq_id])


def test_texts_and_pictures_share_no_block(folder: Path, plain: Path) -> None:
    """Though all begin alike; those of a kind share the beginning, as all do where there is no adapter."""
    for model, between in ((folder, 0), (plain, 48)):
        engine = Engine(model, CONFIG)
        cached = [engine.run([one])[one.seq_id].cached_tokens for one in asked(model)]
        assert cached == [0, between, 48, 48]


def test_a_preempted_request_answers_as_alone(folder: Path) -> None:
    victim = asked(folder)[0]
    expected = seen(Engine(folder, CONFIG).run([victim])[0])
    sampling = SamplingParams(max_tokens=STEPS + 1, temperature=0.0)
    bully = Request(seq_id=9, prompt_ids=ints([5]), sampling=sampling)
    config = replace(CONFIG, max_num_seqs=2, block_size=1)
    engine = Engine(folder, config, num_kv_blocks=len(victim.prompt_ids) + STEPS + 1)
    assert seen(engine.run([bully, replace(victim, priority=1)])[0]) == expected
    assert engine.scheduler.stats().preemptions >= 1


def test_another_engine_goes_on(folder: Path) -> None:
    """From the tokens that the one before has told."""
    one = asked(folder)[0]
    whole = Engine(folder, CONFIG).run([one])[0]
    rest = Engine(folder, CONFIG).run([replace(one, output_ids=ints(whole.token_ids[:4]))])[0]
    assert (rest.token_ids, rest.logprobs) == (whole.token_ids[4:], whole.logprobs[4:])


@pytest.mark.parametrize(
    "speculative",
    [
        SpeculativeConfig(method="ngram", num_speculative_tokens=3),
        SpeculativeConfig(method="self", num_speculative_tokens=3, num_draft_layers=1),
    ],
    ids=lambda speculative: speculative.method,
)
def test_drafts_change_nothing(folder: Path, speculative: SpeculativeConfig) -> None:
    requests = asked(folder)
    found = Engine(folder, replace(CONFIG, speculative_config=speculative)).run(requests)
    expected = Engine(folder, CONFIG).run(requests)
    assert {key: each.token_ids for key, each in found.items()} == {k: each.token_ids for k, each in expected.items()}


def test_a_config_is_read() -> None:
    adapter = Adapter(rank=4, scale=1.5, matrices=("q_proj", "v_proj"))
    unset = {"bias": "none", "use_dora": False, "modules_to_save": None, "rank_pattern": {}, "lora_dropout": 0.05}
    assert read_adapter(FOUND) == read_adapter({**FOUND, **unset}) == adapter


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("r", 0),
        ("r", 2.5),
        ("lora_alpha", None),
        ("lora_alpha", math.nan),
        ("lora_alpha", 10**400),
        ("target_modules", "all-linear"),
        ("target_modules", ["q_proj", "up_proj"]),
        ("target_modules", []),
        ("target_modules", [["q_proj"]]),
        ("bias", "all"),
        ("use_dora", True),
        ("use_rslora", True),
        ("modules_to_save", ["lm_head"]),
        ("alpha_pattern", {"q_proj": 3}),
        ("layers_to_transform", [1]),
        ("of_a_later_version", 1),
    ],
)
def test_a_config_that_says_more_is_refused(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"adapter_config.json: {key} "):
        read_adapter({**FOUND, key: value})


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_an_adapter_without_images_or_tensors_is_refused(tmp_path: Path, plain: Path) -> None:
    make_checkpoint(tmp_path, "llama", {})
    (tmp_path / "adapter_config.json").write_text(json.dumps(FOUND))
    with pytest.raises(CheckpointError, match="llama takes none: merge this one"):
        open_checkpoint(tmp_path)
    copy = copied(plain, tmp_path / "copy")
    (copy / "adapter_config.json").write_text(json.dumps(FOUND))
    with pytest.raises(CheckpointError, match=r"cannot read .*adapter_model\.safetensors"):
        open_checkpoint(copy)


def test_an_adapter_without_its_config_is_refused(tmp_path: Path, folder: Path) -> None:
    """Pictures would be answered without it, in words that mean nothing."""
    copy = copied(folder, tmp_path / "copy")
    (copy / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*adapter_config\.json: No such file"):
        open_checkpoint(copy)


def test_one_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = make_vlm(tmp_path, NAME)
    write_adapter(tmp_path, model, ("q_proj", "v_proj"))
    found = json.loads((tmp_path / "adapter_config.json").read_text())
    for change, message in (({"target_modules": ["q_proj"]}, "unused are .*v_proj.lora"), ({"r": 5}, "has shape")):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**found, **change}))
        with pytest.raises(CheckpointError, match=message):
            Engine(tmp_path, CONFIG)
