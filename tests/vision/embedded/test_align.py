"""The language model for training is SmolLM2's architecture; questions that share a picture do not see each other."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.vision.embedded.tiny import CPU, language_weights, make_language, make_seer
from vision.embedded.align import AlignConfig, AlignRun, Seer, right_answers, scene_turns
from vision.embedded.gate import Gate
from vision.embedded.heads import Heads
from vision.embedded.language import Language
from vision.embedded.painter import Painter
from vision.embedded.projector import PRESENT
from vision.embedded.questions import Question
from vision.embedded.turns import IMAGE_TOKEN, answer_ids, question_first, turns
from vision.embedded.vocabulary import HEADS

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return make_language()


@pytest.fixture
def seer(reference: LlamaForCausalLM) -> Seer:
    return make_seer(reference)


def test_language_equals_transformers(reference: LlamaForCausalLM) -> None:
    language = Language(language_weights(reference), CPU)
    ids = torch.randint(0, 49152, (1, 12))
    with torch.no_grad():
        expected = reference(ids).logits[0].float()
        hidden = language(language.embed(ids), torch.arange(12)[None], torch.ones(1, 12, 12, dtype=torch.bool).tril())
        found = language.logits(hidden)[0]
    assert float((found - expected).abs().max()) < 0.02 * float(expected.abs().max())


def test_questions_of_a_picture_do_not_see_each_other(seer: Seer) -> None:
    features = torch.randn(1, 64, 64)
    asked = (Question("a", "What is this?", "a dog"), Question("b", "How many?", "one"))
    with torch.no_grad():
        alone = [seer.answers([turns(seer.tokenizer, [question], 64)], features)[0] for question in asked]
        both, wanted, places = seer.answers([turns(seer.tokenizer, asked, 64)], features)
    assert seer.tokenizer.decode(wanted.tolist(), skip_special_tokens=False) == "a dog<|im_end|>one<|im_end|>"
    assert places.tolist() == [[0, 1], [0, 1], [0, 1], [0, 2], [0, 2]]
    torch.testing.assert_close(both, torch.cat(alone), rtol=0.02, atol=0.02)
    assert int((turns(seer.tokenizer, asked, 64).ids == IMAGE_TOKEN).sum()) == 64


def test_a_question_may_stand_before_its_picture(seer: Seer) -> None:
    found = question_first(seer.tokenizer, Question("a", "What is this?", "a dog"), 64)
    text = seer.tokenizer.decode(found.ids.tolist(), skip_special_tokens=False)
    before, _, after = text.partition("<empty_output>" * 64)
    assert before.endswith("<|im_start|>user\nWhat is this?\n")
    assert after == "<|im_end|>\n<|im_start|>assistant\na dog<|im_end|>"
    _, wanted, places = seer.answers([found], torch.randn(1, 64, 64))
    assert seer.tokenizer.decode(wanted.tolist(), skip_special_tokens=False) == "a dog<|im_end|>"
    assert places[:, 1].tolist() == [1, 1, 1]


def test_what_is_read_is_answered_letter_by_letter(seer: Seer) -> None:
    """In the caption of "word" that is the one in quotation marks; what stands around it has its usual tokens."""
    question = Question("caption", "What do you see?", 'The word "word".', "word")
    found = [
        seer.tokenizer.decode([token], skip_special_tokens=False) for token in answer_ids(seer.tokenizer, question)
    ]
    assert found == ["The", " word", ' "', "w", "o", "r", "d", '".', "<|im_end|>"]
    whole = answer_ids(seer.tokenizer, Question("word", "Read the word.", "word"))
    assert [seer.tokenizer.decode([token], skip_special_tokens=False) for token in whole] == ["word", "<|im_end|>"]


def test_a_class_begins_as_the_embedding_of_its_name(seer: Seer) -> None:
    word = seer.language.embed(torch.tensor(seer.tokenizer.encode(" circle").ids)).mean(dim=0)
    columns = seer.projector.linear_2.weight.T * PRESENT
    assert int((columns - word).abs().sum(dim=1).argmin()) == 5 + 5 + 6 + 3 + 3 + 11
    with torch.no_grad():
        assert float((columns[33] - word).abs().max()) < 1e-6
        # of heads that start at -4, said to be at -1 where a class is
        assert torch.allclose(seer.projector.linear_1.bias[: sum(HEADS.values())], torch.tensor(PRESENT + 1 - 4))


def test_training_goes_on_and_the_gate_counts(
    seer: Seer, tmp_path: Path, painter: Painter, evaluation_painter: Painter
) -> None:
    config = AlignConfig(scenes=8, batch=2, warmup_steps=1, measure_count=1)
    run = AlignRun(tmp_path, painter, config, seer)
    gate = Gate(seer.tower, Heads(64), evaluation_painter, 1)
    before = {name: value.clone() for name, value in run.trained.state_dict().items()}
    run.run(lambda: None, gate.measure)
    changed = [name for name, value in run.trained.state_dict().items() if not torch.equal(value, before[name])]
    assert len(changed) == len(before)
    again = AlignRun(tmp_path, painter, config, seer)
    assert (again.step, again.pairs) == (4, run.pairs) and run.pairs >= 16
    scene = evaluation_painter.scene(0, 0, "icon")
    _, tasks = scene_turns(seer.tokenizer, scene, 0, 0, 64)
    found = right_answers(seer, [scene], seer.features([scene]), 0)
    assert set(found) == set(tasks) and all(share == 0 for share, _ in found.values())
    assert np.isfinite(list(gate.encoder.values())).all()
