"""What is asked: counts, lengths, seeds, what is shared and what is not."""

import base64
import dataclasses
import io
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loadtest.settings import Lengths, LoadTestError, Shape
from loadtest.trace import read_trace
from loadtest.words import WORDS, Calibration
from loadtest.workload import Session, Workload, length

CALIBRATION = Calibration(tokens_per_word=1.0, overhead=30.0)


def sessions(shape: Shape, count: int = 4, level: str = "a") -> list[Session]:
    workload = Workload(shape, CALIBRATION)
    return [workload.session(level, index) for index in range(count)]


def texts(session: Session) -> list[str]:
    return [message["content"] for turn in session.turns for message in turn.messages]


def num_words(text: str) -> int:
    return len(text.split())


def test_prompts_have_the_tokens_asked_for_with_the_template() -> None:
    for session in sessions(Shape(input_tokens=100, output_tokens=7)):
        assert [num_words(text) for text in texts(session)] == [70]
        assert [turn.output_tokens for turn in session.turns] == [7]


def test_words_of_more_than_one_token_are_fewer() -> None:
    calibration = Calibration(tokens_per_word=1.25, overhead=10)
    assert (calibration.num_words(60), calibration.num_words(5), calibration.num_added_words(50)) == (40, 1, 40)


def test_the_same_seed_asks_the_same_and_another_something_else() -> None:
    shape = Shape(lengths="lognormal", workload="chat", turns=3)
    assert sessions(shape) == sessions(shape)
    assert sessions(shape)[2] == Workload(shape, CALIBRATION).session("a", 2), "whatever was made before it"
    all_texts = [texts(s)[0] for s in sessions(shape) + sessions(shape, level="b")]
    all_texts += [texts(s)[0] for s in sessions(dataclasses.replace(shape, seed=1))]
    assert len({text[:60] for text in all_texts}) == 12, "no prompt begins like another"


@pytest.mark.parametrize(
    ("lengths", "deviation"), [("fixed", 0.0), ("uniform", 0.4 / np.sqrt(3)), ("normal", 0.4), ("lognormal", 0.4)]
)
def test_lengths_have_mean_and_deviation(lengths: Lengths, deviation: float) -> None:
    rng = random.Random(3)
    drawn = np.asarray([length(rng, lengths, 1000, 0.4) for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(1000, rel=0.015)
    assert drawn.std() / 1000 == pytest.approx(deviation, rel=0.04, abs=1e-9)
    assert drawn.min() >= 1
    if lengths == "uniform":
        assert drawn.min() >= 600 and drawn.max() <= 1400


def test_lengths_are_at_least_one() -> None:
    rng = random.Random(0)
    assert min(length(rng, "normal", 2, 1.0) for _ in range(200)) == 1


def test_prefixes_are_shared_within_a_group_of_a_level_alone() -> None:
    shape = Shape(workload="prefix", prefix_tokens=50, prefix_groups=2, input_tokens=20)
    made = [texts(session) for session in sessions(shape)]
    assert [[num_words(text) for text in pair] for pair in made] == [[50, 20]] * 4
    assert made[0][0] == made[2][0] != made[1][0] == made[3][0]
    assert len({pair[1] for pair in made}) == 4
    assert texts(sessions(shape, level="b")[0])[0] != made[0][0]


def test_a_chat_has_turns_of_new_text() -> None:
    (session,) = sessions(Shape(workload="chat", turns=3, input_tokens=50), count=1)
    assert [num_words(text) for text in texts(session)] == [20, 50, 50]
    assert len(set(texts(session))) == 3


@pytest.mark.parametrize("image_format", ["png", "jpeg"])
def test_images_have_sizes_in_turn_and_are_never_the_same(image_format: Any) -> None:
    shape = Shape(workload="images", images=3, image_sizes=((64, 32), (48, 80)), image_format=image_format)
    contents: list[Any] = [session.turns[0].messages[0]["content"] for session in sessions(shape, count=2)]
    urls = [part["image_url"]["url"] for content in contents for part in content if part["type"] == "image_url"]
    assert len(set(urls)) == 6
    opened = [Image.open(io.BytesIO(base64.b64decode(url.partition("base64,")[2]))) for url in urls]
    assert [image.size for image in opened] == [(64, 32), (48, 80), (64, 32)] * 2
    assert {image.format for image in opened} == {image_format.upper()}
    assert [content[-1]["type"] for content in contents] == ["text", "text"]


def test_words_are_different_and_plain() -> None:
    assert len(set(WORDS)) == len(WORDS) > 250
    assert all(re.fullmatch("[a-z]+", word) for word in WORDS)


def test_a_trace_says_when_and_what(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"offset": 2.5, "input_tokens": 40, "output_tokens": 3}\n\n'
        '{"offset": 1, "messages": [{"role": "user", "content": "hello"}], "output_tokens": 9}\n'
    )
    lines = read_trace(path)
    assert [line.offset for line in lines] == [1, 2.5]
    made = [Workload(Shape(), CALIBRATION).traced(line, index) for index, line in enumerate(lines)]
    assert texts(made[0]) == ["hello"] and num_words(texts(made[1])[0]) == 10
    assert [session.turns[0].output_tokens for session in made] == [9, 3]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "the file is empty"),
        ('{"offset": 0, "output_tokens": 1}', "line 1: give input_tokens (1 or more) or messages"),
        ('{"offset": 0, "output_tokens": 1, "input_tokens": 3, "messages": [{}]}', "line 1: give input_tokens"),
        ('{"offset": -1, "output_tokens": 1, "input_tokens": 1}', "line 1: offset must be 0 or more"),
        (
            '\n{"offset": 0, "output_tokens": 0, "input_tokens": 1}',
            "line 2: offset must be 0 or more and output_tokens",
        ),
        ('{"offset": 0, "outputs": 1}', "a line looks like"),
        ("hello", "a line looks like"),
    ],
)
def test_a_trace_that_is_wrong_is_told_where(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(LoadTestError, match=re.escape(said)):
        read_trace(path)


def test_a_trace_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="No such file"):
        read_trace(tmp_path / "none")
