"""Parameters that speak of tokens: how many, which, and words that become some; errors name the field."""

import pytest

from server.errors import BadRequest
from server.prompt.build import bad_words, logit_bias, output_budget, stop_token_ids
from server.prompt.tokenizer import Tokenizer, load_tokenizer
from tests.server.tiny_tokenizers import chatml_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(chatml_folder(tmp_path_factory.mktemp("chatml")))


def test_output_budget() -> None:
    assert output_budget(100, 128, None) == 28
    assert output_budget(100, 128, 65_535) == 28
    assert output_budget(100, 128, 5) == 5


def test_logit_bias(tokenizer: Tokenizer) -> None:
    assert logit_bias(tokenizer, {"5": -100, "300": 1.5}) == ((5, -100.0), (300, 1.5))
    size = tokenizer.vocab_size
    assert logit_bias(tokenizer, {str(size - 1): 0.0}) == ((size - 1, 0.0),)
    for key in (str(size), "-1", "05", "5.0", "x", "", " 5", "٥", "9" * 5000, "+5", "1_0"):
        with pytest.raises(BadRequest) as caught:
            logit_bias(tokenizer, {key: 1.0})
        assert caught.value.param == "logit_bias"
        assert len(caught.value.message) < 120


def test_stop_token_ids(tokenizer: Tokenizer) -> None:
    assert stop_token_ids(tokenizer, [7, 5, 7]) == (7, 5)
    assert stop_token_ids(tokenizer, []) == ()
    size = tokenizer.vocab_size
    with pytest.raises(BadRequest, match=f"stop_token_ids holds token id {size}; ids are 0 to {size - 1}"):
        stop_token_ids(tokenizer, [5, size])


def test_bad_words_at_the_beginning_and_after_a_space(tokenizer: Tokenizer) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False, allow_special=True))

    assert bad_words(tokenizer, ["France", " the"]) == (ids("France"), ids(" France"), ids("the"), ids(" the"))
    assert len(ids(" the")) == 1
    assert bad_words(tokenizer, ["the", "the"]) == (ids("the"), ids(" the"))
    with pytest.raises(BadRequest, match="white space"):
        bad_words(tokenizer, [" "])


def test_bad_words_have_a_bound_together(tokenizer: Tokenizer) -> None:
    words = ["a" * 1000] * 8
    assert bad_words(tokenizer, [*words, "b" * 192])
    with pytest.raises(BadRequest, match="8192 characters"):
        bad_words(tokenizer, [*words, "b" * 193])
