"""Moonshot's tiktoken.model: ids are those of tiktoken's algorithm, written down here, with the publisher's pattern."""

import base64
import json
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model_runtime.weights.errors import CheckpointError
from server.prompt.byte_level import byte_level_alphabet
from server.prompt.tokenizer import load_tokenizer
from tests.server.tiny_tokenizers import trained_bpe

PATTERN = "|".join(
    (
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    )
)
"""As the publisher's code has it."""
CONFIG: dict[str, object] = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
}
MARKS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


def ranks_of() -> dict[bytes, int]:
    """All bytes, what a training found to merge, and some words from their beginnings on."""
    alphabet, fast = byte_level_alphabet(), trained_bpe([])
    vocabulary = {byte: index for index, byte in enumerate(bytes([byte]) for byte in range(256))}
    for token in sorted(fast.get_vocab(), key=fast.get_vocab().__getitem__):
        if all(character in alphabet for character in token):
            vocabulary.setdefault(bytes(map(alphabet.__getitem__, token)), len(vocabulary))
    for word in ("北京市", "京市", "中文中文", " Pascal", "ascal", "English"):
        for end in range(2, len(word.encode()) + 1):
            vocabulary.setdefault(word.encode()[:end], len(vocabulary))
    return vocabulary


RANKS = ranks_of()


def write_folder(folder: Path, config: dict[str, object], ranks: dict[bytes, int] = RANKS) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    first = len(ranks)
    names = dict(enumerate(("[BOS]", "[EOS]", *MARKS), start=first))
    added = {str(token_id): {"content": content, "special": True} for token_id, content in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added} | config))
    return folder


def expected_ids(text: str) -> list[int]:
    """Each piece: if it is a token, that; else the two neighbours whose union has the lowest rank become one."""
    ids: list[int] = []
    for piece in regex.findall(PATTERN, text, flags=regex.V1):
        parts = [bytes([byte]) for byte in piece.encode()]
        if piece.encode() in RANKS:
            parts = [piece.encode()]
        while len(parts) > 1:
            unions = [RANKS.get(left + right, len(RANKS)) for left, right in pairwise(parts)]
            if min(unions) == len(RANKS):
                break
            at = unions.index(min(unions))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [RANKS[part] for part in parts]
    return ids


def test_ids_are_those_of_tiktoken(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, CONFIG))
    assert tokenizer.vocab_size == len(RANKS) + 256
    assert len(RANKS) > 350
    words = [
        "The capital ",
        "北京",
        "市 Pascal",
        "中文English混合",
        "I'LL",
        "'s",
        " 12345",
        "  ",
        "\r\n/",
        "é",
        "e\u0301",
        "ʰ",
    ]
    pieces = st.lists(st.sampled_from(words), max_size=8).map("".join)

    @settings(max_examples=200, deadline=None)
    @example("of the text of tokens  \n\n x")
    @given(pieces | st.text(max_size=30))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=True, allow_special=False).tolist()
        assert ids == expected_ids(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text

    check()


def test_text_never_becomes_a_mark(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, CONFIG))
    text = f"{MARKS[0]}message role={MARKS[2]} <|reserved_token_{len(RANKS) + 9}|> [EOS]"
    plain = tokenizer.encode(text, add_special_tokens=False, allow_special=False).tolist()
    assert plain == expected_ids(text)
    marked = tokenizer.encode(text, add_special_tokens=False, allow_special=True).tolist()
    first = len(RANKS)
    assert [token for token in marked if token >= first] == [first + 2, first + 4, first + 9, first + 1]
    assert tokenizer.special_variables == {"bos_token": "[BOS]", "eos_token": "[EOS]"}
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("change", "ranks", "words"),
    [
        ({"auto_map": {"AutoTokenizer": ["hy.HYTokenizer", None]}}, RANKS, "names none of tokenization_kimi.py"),
        ({"auto_map": None}, RANKS, "names none of tokenization_kimi.py"),
        ({}, {token: rank + 1 for token, rank in RANKS.items()}, "ranks are not 0 to"),
        ({}, {token: rank for token, rank in RANKS.items() if token != b"a"}, "ranks are not 0 to"),
        ({"added_tokens_decoder": {str(len(RANKS)): {"content": 5}}}, RANKS, "has the content 5"),
        (
            {"added_tokens_decoder": {str(len(RANKS) + at): {"content": "x"} for at in (0, 1)}},
            RANKS,
            "the same content",
        ),
    ],
)
def test_folders_that_cannot_be_served(
    tmp_path: Path, change: dict[str, object], ranks: dict[bytes, int], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        load_tokenizer(write_folder(tmp_path, CONFIG | change, ranks))


def test_a_file_that_is_none(tmp_path: Path) -> None:
    write_folder(tmp_path, CONFIG)
    (tmp_path / "tiktoken.model").write_text("no base64 here\n")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model: "):
        load_tokenizer(tmp_path)
