"""All stages one after the other, on models that are tiny but for the vocabulary; an interrupted one goes on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlavaForConditionalGeneration

from tests.vision.embedded.tiny import CPU, SMALL, language_weights, make_language
from vision.embedded.align import AlignConfig
from vision.embedded.encoder import EncoderConfig, Painters, load_encoder
from vision.embedded.measure import class_scores
from vision.embedded.train import STAGES, Pipeline, waiter

pytestmark = pytest.mark.model


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_from_pictures_to_a_checkpoint(tmp_path: Path, painters: Painters, capsys: pytest.CaptureFixture[str]) -> None:
    weights = language_weights(make_language())
    steps: list[None] = []
    pipeline = Pipeline(
        folder=tmp_path,
        painters=painters,
        language=lambda: weights,
        tower=SMALL,
        encoder=EncoderConfig(samples=16, batch=8, first_pictures=32, warmup_steps=1, measure_count=2),
        align=AlignConfig(scenes=4, batch=2, warmup_steps=1, measure_count=1),
        device=CPU,
        wait=lambda: steps.append(None),
    )
    for stage in STAGES:
        pipeline.run(stage)
    assert len(steps) == 4

    (curve,) = lines(tmp_path / "encoder.jsonl")
    assert curve["samples"] == 16 and isinstance(curve["right"], dict)
    assert {"count", "one colour", "among several shape", "icon of an unseen vendor"} <= curve["right"].keys()
    (joined,) = lines(tmp_path / "align.jsonl")
    assert joined["scenes"] == 4 and joined.keys() >= {"loss", "right", "control"}

    scene = painters.evaluation.scene(0, 0, "shapes")
    scores = class_scores(*load_encoder(tmp_path, SMALL), [scene])[0]["colour"]
    assert scores.shape == (64, 11) and float(scores.exp().sum(dim=-1).mean()) == pytest.approx(1, abs=1e-5)
    assert isinstance(LlavaForConditionalGeneration.from_pretrained(tmp_path / "merged"), LlavaForConditionalGeneration)
    assert (tmp_path / "eyes" / "adapter_model.safetensors").stat().st_size < 200_000

    capsys.readouterr()
    replace(pipeline, align=replace(pipeline.align, scenes=6)).run("align")
    assert "alignment: step 2 of 3" in capsys.readouterr().out and len(steps) == 5


def test_a_file_makes_it_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pause, slept = tmp_path / "pause", []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            pause.unlink()

    monkeypatch.setattr("time.sleep", sleep)
    wait = waiter([tmp_path / "other", pause])
    wait()
    assert slept == []
    pause.touch()
    wait()
    assert len(slept) == 2
