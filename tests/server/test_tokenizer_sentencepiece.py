"""A GGUF file's SentencePiece tokenizer equals one by hand: ids, flags, special tokens, and what is refused."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runtime.weights.errors import CheckpointError
from server.prompt.tokenizer import Tokenizer, load_tokenizer
from tests.server.tiny_tokenizers import TEXTS, sentencepiece_metadata, write_gguf

RUNS = st.lists(st.sampled_from(["a", "aa", "ab", "b", " ", "   ", "the", "é", "▁", "\n", "\t", "東"]), max_size=30)


def by_hand(metadata: dict[str, object], *, prefix: bool) -> Callable[[str], list[int]]:
    """The neighbours that make the best piece are joined, the leftmost of equals first; then bytes."""
    columns = [metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")]
    assert all(isinstance(column, list) for column in columns)
    rows = list(enumerate(zip(*columns, strict=True)))  # type: ignore[call-overload]
    pieces = {token: (score, index) for index, (token, score, kind) in rows if kind == 1}
    defined = {token: index for index, (token, _, kind) in rows if kind == 4}
    ids = {token: index for index, (token, _, _) in rows}

    def plain(text: str) -> list[int]:
        parts = list(("▁" if prefix and text else "") + text.replace(" ", "▁"))
        while True:
            joined = [left + right for left, right in pairwise(parts)]
            found = [(-pieces[piece][0], at) for at, piece in enumerate(joined) if piece in pieces]
            if not found:
                break
            _, at = min(found)
            parts[at : at + 2] = [joined[at]]
        spelled = [[part] if part in pieces else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
        return [ids[token] for tokens in spelled for token in tokens]

    def encode(text: str) -> list[int]:
        if not defined:
            return plain(text)
        longest = sorted(map(re.escape, defined), key=len, reverse=True)
        cut = re.split(f"({'|'.join(longest)})", text)
        return [id for part in cut if part for id in ([defined[part]] if part in defined else plain(part))]

    return encode


def loaded(folder: Path, metadata: dict[str, object]) -> Tokenizer:
    return load_tokenizer(write_gguf(folder / "m.gguf", metadata))


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, allow_special=False).tolist()


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_are_those_by_hand_and_the_text_comes_back(tmp_path: Path, prefix: bool) -> None:
    metadata = sentencepiece_metadata(add_space_prefix=prefix)
    tokenizer, oracle = loaded(tmp_path, metadata), by_hand(metadata, prefix=prefix)

    @settings(max_examples=300, deadline=None)
    @given(TEXTS | RUNS.map("".join))
    def check(text: str) -> None:
        ids = plain_ids(tokenizer, text)
        assert ids == oracle(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")

    check()


def test_defined_tokens_are_found_first(tmp_path: Path) -> None:
    """As Gemma's: spaces and line ends are tokens in rows, and texts begin without a space."""
    metadata = sentencepiece_metadata(add_space_prefix=False)
    for key, values in (("tokens", ["\n", "\n\n", "  "]), ("scores", [-1000.0] * 3), ("token_type", [4] * 3)):
        column = metadata[f"tokenizer.ggml.{key}"]
        assert isinstance(column, list)
        metadata[f"tokenizer.ggml.{key}"] = column + values
    tokenizer, oracle = loaded(tmp_path, metadata), by_hand(metadata, prefix=False)
    count = tokenizer.vocab_size
    assert plain_ids(tokenizer, "\n\n\n") == [count - 2, count - 3]
    assert count - 1 in plain_ids(tokenizer, "the  end")

    @settings(max_examples=200, deadline=None)
    @given(RUNS.map("".join))
    def check(text: str) -> None:
        assert plain_ids(tokenizer, text) == oracle(text)

    check()


def test_flags_say_what_is_around_a_text(tmp_path: Path) -> None:
    for flags, before, after in (
        ({}, [1], []),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ):
        tokenizer = loaded(tmp_path, sentencepiece_metadata(**flags))
        for allow in (True, False):
            ids = tokenizer.encode("the", add_special_tokens=True, allow_special=allow).tolist()
            assert ids == [*before, *plain_ids(tokenizer, "the"), *after]


def test_text_behind_a_special_token_begins_with_a_space(tmp_path: Path) -> None:
    """As in llama.cpp; and a user's literal of one is text."""
    tokenizer = loaded(tmp_path, sentencepiece_metadata())
    ids = tokenizer.encode("<s>the end</s>the", add_special_tokens=False, allow_special=True).tolist()
    assert ids == [1, *plain_ids(tokenizer, "the end"), 2, *plain_ids(tokenizer, "the")]
    assert not {1, 2} & set(plain_ids(tokenizer, "<s>the</s>"))
    assert tokenizer.special_ids == {0, 1, 2}


@pytest.mark.parametrize(("architecture", "has_line_end"), [("phi3", False), ("llama", True)])
def test_phi3_has_white_space_behind_its_tokens(tmp_path: Path, architecture: str, has_line_end: bool) -> None:
    metadata = sentencepiece_metadata() | {"general.architecture": architecture}
    tokenizer = loaded(tmp_path, metadata)
    line_end = tokenizer.encode("a\n", add_special_tokens=False, allow_special=False).tolist()[-1]
    assert tokenizer.token_bytes(line_end) == b"\n"
    for token, kept in (("</s>", has_line_end), ("<s>", True)):
        ids = tokenizer.encode(f"{token}\nthe", add_special_tokens=False, allow_special=True).tolist()
        assert (line_end in ids) == kept


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scores": [0.0]}, r"tokenizer.ggml.scores must hold \d+ numbers"),
        ({"token_type": [1]}, r"tokens have 1 of tokenizer.ggml.token_type; they must be as many"),
        ({"remove_extra_whitespaces": True}, "its tokenizer changes texts before it cuts them"),
        ({"model": "t5"}, "tokenizer model 't5' is not supported"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        loaded(tmp_path, sentencepiece_metadata(**change))


def test_scores_that_tell_nothing_are_refused(tmp_path: Path) -> None:
    """Files made of a tokenizer.json have the same score everywhere: the order of its merges is lost."""
    metadata = sentencepiece_metadata()
    scores = metadata["tokenizer.ggml.scores"]
    assert isinstance(scores, list)
    with pytest.raises(CheckpointError, match="all scores of its vocabulary are -1000, which does not tell"):
        loaded(tmp_path, metadata | {"tokenizer.ggml.scores": [-1000.0] * len(scores)})
