"""Where the end of a text stood before."""

from scheduler.guesses import Guesses, go_on, level_of
from scheduler.lookup import NOWHERE, TextIndex
from scheduler.plan import ints


def _find(text: list[int], most: int = 4, least: int = 2, start: int = 0) -> tuple[int, int]:
    """As a drafter looks the end of a text up in the text."""
    tokens = ints(text)
    index = TextIndex(least, start)
    index.extend(tokens, len(tokens) - 1)
    return index.find(tokens, tokens[-most:])


def test_longest_run_wins_and_of_equal_ones_the_newest() -> None:
    assert _find([1, 2, 3, 9, 8, 2, 3, 7, 1, 2, 3]) == (3, 3)
    assert _find([5, 2, 3, 9, 6, 2, 3, 7, 1, 2, 3]) == (7, 2)


def test_runs_are_as_short_and_as_long_as_asked_for() -> None:
    assert _find([1, 2, 3, 4, 5, 1, 2, 3, 4], most=3) == (4, 3)
    assert _find([1, 2, 3, 4, 5, 1, 2, 3, 4], most=8) == (4, 4)
    assert _find([9, 3, 1, 3], least=2) == (NOWHERE, 0)
    assert _find([9, 3, 1, 3], least=1) == (2, 1)


def test_end_of_the_text_does_not_find_itself() -> None:
    assert _find([1, 2, 3]) == (NOWHERE, 0)
    assert _find([1]) == (NOWHERE, 0)
    assert _find([4, 4, 4, 4], most=2) == (3, 2)


def test_nothing_is_found_before_the_start() -> None:
    text = [1, 2, 7, 1, 2, 8, 1, 2]
    assert _find(text, start=0) == (5, 2)
    assert _find(text, start=3) == (5, 2)
    assert _find(text, start=4) == (NOWHERE, 0)
    assert _find([1, 2, 3, 9, 1, 2, 3], most=3, start=1) == (3, 2)


def test_index_grows_with_the_text() -> None:
    text, index = ints([1, 2, 9]), TextIndex(2)
    index.extend(text, 3)
    text.extend([5, 1, 2])
    assert index.find(text, text[-4:]) == (2, 2)
    index.extend(text, 6)
    assert index.find(text, text[-4:]) == (6, 4)


def test_copy_repeats_where_the_text_ends() -> None:
    text = ints([1, 2, 3, 4])
    assert go_on(text, 1, 2).tolist() == [2, 3]
    assert go_on(text, 2, 7).tolist() == [3, 4, 3, 4, 3, 4, 3]
    assert go_on(text, 3, 3).tolist() == [4, 4, 4]


def test_rate_follows_what_was_right() -> None:
    guesses = Guesses([0.5, 0.7], level=1, tokens=ints([5, 6, 7]), position=2)
    guesses.judge(ints([1, 2, 5, 6, 8]))
    assert abs(guesses.rate - 0.8 * (1 - 0.8**2 * 0.3)) < 1e-9  # right, right, wrong
    assert guesses.rates[0] == 0.5
    guesses.tokens, guesses.position, before = ints([3]), 5, guesses.rate
    guesses.judge(ints([1, 2, 5, 6, 8]))
    assert guesses.rate == before


def test_the_longer_the_run_the_surer_the_guess() -> None:
    assert [level_of(length) for length in (0, 1, 2, 3, 4, 7, 8, 15, 16, 64)] == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]
