"""Incremental text: whole characters, stop strings across tokens, the same text however the tokens are cut."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from server.detokenize import TextStream

SPECIAL = 0


class Bytes:
    """Token i + 1 is byte i; token 0 is special; larger ids are whole strings."""

    def __init__(self, words: tuple[str, ...] = ()) -> None:
        self._table = [b"<|end|>", *(bytes([byte]) for byte in range(256)), *(word.encode() for word in words)]

    def token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == SPECIAL


def ids_of(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """The ids in pieces of the sizes of `cuts`, in turn."""
    pieces, start, turn = [], 0, 0
    while start < len(ids):
        size = cuts[turn % len(cuts)]
        pieces.append(ids[start : start + size])
        start, turn = start + size, turn + 1
    return pieces


def run(stream: TextStream, pieces: list[list[int]]) -> list[str]:
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


@given(st.lists(st.integers(0, 256), max_size=60), CUTS)
def test_any_bytes_in_any_pieces_give_one_text(ids: list[int], cuts: list[int]) -> None:
    whole = "".join(run(TextStream(Bytes()), [ids]))
    assert "".join(run(TextStream(Bytes()), chunked(ids, cuts))) == whole
    data = bytes(token - 1 for token in ids if token != SPECIAL)
    replaced = data.decode("utf-8", "replace")
    assert whole in (replaced, replaced.removesuffix("\ufffd"))


@given(st.text(max_size=30), CUTS)
def test_characters_come_whole(text: str, cuts: list[int]) -> None:
    pieces = run(TextStream(Bytes()), chunked(ids_of(text), cuts))
    assert "".join(pieces) == text


def test_no_replacement_characters_in_any_script() -> None:
    text = "访问搜索预报👩‍👩‍👧‍👦ďábelské🇨🇿"
    pieces = run(TextStream(Bytes()), [[token] for token in ids_of(text)])
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)


def test_a_character_cut_by_the_end_is_dropped_and_a_wrong_byte_is_replaced() -> None:
    euro = ids_of("€")
    assert run(TextStream(Bytes()), [ids_of("a") + euro[:2]]) == ["a", ""]
    assert run(TextStream(Bytes()), [euro[:2], ids_of("a")]) == ["", "\ufffda", ""]


def test_special_tokens_are_no_text_and_do_not_cut_characters() -> None:
    euro = ids_of("€")
    assert "".join(run(TextStream(Bytes()), [euro[:1], [SPECIAL], euro[1:]])) == "€"
    shown = TextStream(Bytes(), skip_special_tokens=False)
    assert shown.push([*ids_of("a"), SPECIAL]) == "a<|end|>"


STOPS = st.lists(st.text("ab<>é", min_size=1, max_size=5), max_size=4).map(tuple)


@settings(max_examples=400)
@given(st.text("ab<>é", max_size=40), STOPS, CUTS, st.booleans())
def test_stop_strings_against_brute_force(text: str, stops: tuple[str, ...], cuts: list[int], include: bool) -> None:
    stream = TextStream(Bytes(), stops, include)
    shown = ""
    found = first_stop(text, stops)
    expected = text if found is None else found[0] + (found[1] if include else "")
    seen = 0
    for piece in chunked(ids_of(text), cuts):
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
    tokens = Bytes(("The", " end", "ing", " of"))
    stream = TextStream(tokens, (" ending of",))
    assert [stream.push([257 + index]) for index in range(4)] == ["The", "", "", ""]
    assert stream.stopped == " ending of"
    assert stream.push(ids_of("more")) == ""
    assert stream.finish() == ""


def test_held_text_is_released_when_it_does_not_match() -> None:
    stream = TextStream(Bytes(), ("END",))
    assert [stream.push(ids_of(text)) for text in ("a E", "N", "Ergy EN")] == ["a ", "", "ENErgy "]
    assert stream.finish() == "EN"
    assert stream.finish() == ""


def test_the_first_to_be_complete_wins_and_the_longest_of_those() -> None:
    early = TextStream(Bytes(), ("abcd", "bc"))
    assert (early.push(ids_of("xabcd")), early.stopped) == ("xa", "bc")
    longest = TextStream(Bytes(), ("d", "bcd", "cd"), True)
    assert (longest.push(ids_of("abcd")), longest.stopped) == ("abcd", "bcd")


def test_a_hostile_stop_string_costs_constant_time_per_token() -> None:
    stream = TextStream(Bytes(), ("a" * 5000 + "b",) * 4)
    start = time.perf_counter()
    shown = "".join(stream.push([ord("a") + 1]) for _ in range(30_000))
    assert time.perf_counter() - start < 5.0, "quadratic work would take minutes"
    assert len(shown) == 25_000
    assert stream.finish() == "a" * 5000
