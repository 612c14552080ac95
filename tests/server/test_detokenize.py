"""Incremental text: whole characters, stop strings across tokens, the same text however the tokens are cut."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from server.detokenize import StopFilter, TextDecoder


class TextStream:
    """Decoder and stop strings one after the other."""

    def __init__(self, stop: tuple[str, ...] = (), include_stop: bool = False) -> None:
        self.decoder, self.filter = TextDecoder(), StopFilter(stop, include_stop)
        self.finish = self.filter.finish

    @property
    def stopped(self) -> str | None:
        return self.filter.stopped

    def push(self, data: bytes, *, may_stop: bool = True) -> str:
        return self.filter.push(self.decoder.push(data), may_stop=may_stop)


def chunked(data: bytes, cuts: list[int]) -> list[bytes]:
    """The bytes in pieces of the sizes of `cuts`, in turn."""
    pieces, start, turn = [], 0, 0
    while start < len(data):
        size = cuts[turn % len(cuts)]
        pieces.append(data[start : start + size])
        start, turn = start + size, turn + 1
    return pieces


def run(stream: TextStream, pieces: list[bytes]) -> list[str]:
    return [*(stream.push(piece) for piece in pieces), "" if stream.stopped else stream.finish()]


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str] | None:
    """(text before, stop string) of the first stop string to be complete, the longest of those; by brute force."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return None


CUTS = st.lists(st.integers(1, 5), min_size=1, max_size=8)


@given(st.binary(max_size=60), CUTS)
def test_any_bytes_in_any_pieces_give_one_text(data: bytes, cuts: list[int]) -> None:
    whole = "".join(run(TextStream(), [data]))
    assert "".join(run(TextStream(), chunked(data, cuts))) == whole
    replaced = data.decode("utf-8", "replace")
    assert whole in (replaced, replaced.removesuffix("\ufffd"))


@given(st.text(max_size=30), CUTS)
def test_characters_come_whole(text: str, cuts: list[int]) -> None:
    pieces = run(TextStream(), chunked(text.encode(), cuts))
    assert "".join(pieces) == text


def test_no_replacement_characters_in_any_script() -> None:
    text = "访问搜索预报👩‍👩‍👧‍👦ďábelské🇨🇿"
    pieces = run(TextStream(), [bytes([byte]) for byte in text.encode()])
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


def test_a_character_cut_by_the_end_is_dropped_and_a_wrong_byte_is_replaced() -> None:
    euro = "€".encode()
    assert run(TextStream(), [b"a" + euro[:2]]) == ["a", ""]
    assert run(TextStream(), [euro[:2], b"a"]) == ["", "\ufffda", ""]


STOPS = st.lists(st.text("ab<>é", min_size=1, max_size=5), max_size=4).map(tuple)


@settings(max_examples=400)
@given(st.text("ab<>é", max_size=40), STOPS, CUTS, st.booleans())
def test_stop_strings_against_brute_force(text: str, stops: tuple[str, ...], cuts: list[int], include: bool) -> None:
    stream = TextStream(stops, include)
    shown = ""
    found = first_stop(text, stops)
    expected = text if found is None else found[0] + (found[1] if include else "")
    seen = 0
    for piece in chunked(text.encode(), cuts):
        shown += stream.push(piece)
        assert expected.startswith(shown), "nothing is shown that must be taken back"
        seen += len(piece)
        if stream.stopped is None:
            certain = text.encode()[:seen].decode("utf-8", "ignore")
            held = certain[len(shown) :]
            assert held == "" or any(stop.startswith(held) for stop in stops), "only what may become a stop is held"
    shown += stream.finish()
    assert shown == expected
    assert stream.stopped == (None if found is None else found[1])


def test_a_stop_string_across_tokens_and_text_after_it() -> None:
    stream = TextStream((" ending of",))
    assert [stream.push(token) for token in (b"The", b" end", b"ing", b" of")] == ["The", "", "", ""]
    assert stream.stopped == " ending of"
    assert stream.push(b"more") == ""
    assert stream.finish() == ""


def test_held_text_is_released_when_it_does_not_match() -> None:
    stream = TextStream(("END",))
    assert [stream.push(text.encode()) for text in ("a E", "N", "Ergy EN")] == ["a ", "", "ENErgy "]
    assert stream.finish() == "EN"
    assert stream.finish() == ""


def test_the_first_to_be_complete_wins_and_the_longest_of_those() -> None:
    early = TextStream(("abcd", "bc"))
    assert (early.push(b"xabcd"), early.stopped) == ("xa", "bc")
    longest = TextStream(("d", "bcd", "cd"), True)
    assert (longest.push(b"abcd"), longest.stopped) == ("abcd", "bcd")


def test_a_hostile_stop_string_costs_constant_time_per_token() -> None:
    stream = TextStream(("a" * 5000 + "b",) * 4)
    start = time.perf_counter()
    shown = "".join(stream.push(b"a") for _ in range(30_000))
    assert time.perf_counter() - start < 5.0, "quadratic work would take minutes"
    assert len(shown) == 25_000
    assert stream.finish() == "a" * 5000


@settings(max_examples=200)
@given(st.text("ab<>é", max_size=30), STOPS.filter(bool), st.integers(0, 12))
def test_a_stop_string_that_may_not_stop_yet_is_text(text: str, stops: tuple[str, ...], early: int) -> None:
    stream = TextStream(stops)
    shown = "".join(stream.push(char.encode(), may_stop=index >= early) for index, char in enumerate(text))
    ends = [end for end in range(early + 1, len(text) + 1) if text[:end].endswith(stops)]
    longest = max((stop for stop in stops if ends and text[: ends[0]].endswith(stop)), key=len, default=None)
    assert stream.stopped == longest
    assert shown + stream.finish() == (text if longest is None else text[: ends[0] - len(longest)])
