"""A GGUF file's tokenizer is built from its metadata, and equals one by hand or transformers' own."""

from collections.abc import Callable
from inspect import signature
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from model_runtime.weights.errors import CheckpointError
from server.prompt.tokenizer import load_tokenizer
from tests.server.tiny_tokenizers import CHATML_SPECIALS, TEXTS, gguf_metadata_of, trained_bpe, write_gguf

GPT2_SPLIT = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def bpe_by_hand(metadata: dict[str, object]) -> Callable[[str], list[int]]:
    """Byte-level BPE with the `smollm` split, straight from its definition: the oracle."""
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    ids = {token: index for index, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}

    def word_ids(word: str) -> list[int]:
        parts = [spelled[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = [ranks.get(pair, len(ranks)) for pair in pairwise(parts)]
            best = min(pairs)
            if best == len(ranks):
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        return [ids[part] for part in parts]

    def encode(text: str) -> list[int]:
        pieces = [piece for piece in regex.split(r"(\p{N})", text) if piece]
        return [id for piece in pieces for word in GPT2_SPLIT.findall(piece) for id in word_ids(word)]

    return encode


def test_gguf_smollm_equals_a_tokenizer_by_hand(tmp_path: Path) -> None:
    metadata = gguf_metadata_of(trained_bpe(CHATML_SPECIALS), "smollm")
    tokenizer = load_tokenizer(write_gguf(tmp_path / "tiny.gguf", metadata))
    oracle = bpe_by_hand(metadata)

    @settings(max_examples=200, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        assert tokenizer.encode(text, add_special_tokens=False, allow_special=False).tolist() == oracle(text)

    check()


O200K = "|".join(
    (
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    )
)
"""As tiktoken has it."""


TEKKEN = "|".join(
    (
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*""",
        r"""\p{N}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    )
)
"""As in Mistral Nemo's tokenizer.json."""
SEED = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|"""
    r"""\s+(?!\S)|\s+"""
)
"""As in Seed-Coder's."""
DEEPSEEK3 = (
    r"""\p{N}{1,3}""",
    r"""[一-龥\u3040-ゟ゠-ヿ]+""",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
"""As in DeepSeek-V3's: one after the other."""


def test_gguf_splits_are_those_of_the_publishers(tmp_path: Path) -> None:
    llama3 = signature(TikTokenConverter.__init__).parameters["pattern"].default
    qwen2 = ("qwen2", (PRETOKENIZE_REGEX,), normalizers.NFC())
    cases = (
        ("llama-bpe", (llama3,), None),
        ("dbrx", (llama3,), None),
        ("glm4", (llama3,), None),
        qwen2,
        ("gpt-4o", (O200K,), None),
        ("tekken", (TEKKEN,), None),
        ("seed-coder", (SEED,), None),
        ("deepseek-v3", DEEPSEEK3, None),
        ("exaone4", (GPT2_SPLIT.pattern,), None),
        ("olmo", (GPT2_SPLIT.pattern,), normalizers.NFC()),
    )
    for pre, patterns, normalizer in cases:
        fast = trained_bpe(CHATML_SPECIALS)
        metadata = gguf_metadata_of(fast, pre) | {"tokenizer.ggml.add_bos_token": False}
        tokenizer = load_tokenizer(write_gguf(tmp_path / f"{pre}.gguf", metadata))
        fast.model.ignore_merges = pre in ("llama-bpe", "tekken")
        if normalizer is not None:
            fast.normalizer = normalizer
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        fast.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
        for text in (
            "I'LL see 12345 of the  ends\r\n\n x",
            "e\u0301 té 1a\n \n",
            " \u2003the\t12",
            "<|im_end|>theEnd a/\n",
            "x=東京タワー.split() //// 「the」 'Ll 12\n;\n-the",
        ):
            assert tokenizer.encode(text, add_special_tokens=True, allow_special=True).tolist() == fast.encode(text).ids


def test_gguf_adds_what_its_metadata_says(tmp_path: Path) -> None:
    metadata = gguf_metadata_of(trained_bpe(CHATML_SPECIALS), "gpt-2")
    metadata |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "tiny.gguf", metadata))
    inner = tokenizer.encode("the", add_special_tokens=False, allow_special=True).tolist()
    for allow in (True, False):
        assert tokenizer.encode("the", add_special_tokens=True, allow_special=allow).tolist() == [1, *inner, 2]
    llama3 = gguf_metadata_of(trained_bpe(CHATML_SPECIALS), "llama-bpe")
    assert load_tokenizer(write_gguf(tmp_path / "b.gguf", llama3)).encode(
        "the", add_special_tokens=True, allow_special=True
    ).tolist() == [1, *inner]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.pre": "made-up"}, "pre-tokenizer 'made-up' is not supported; known are smollm"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer model 'rwkv' is not supported"),
        ({"tokenizer.ggml.merges": ["no such"]}, "the merges do not fit the vocabulary"),
        ({"tokenizer.ggml.tokens": 5}, "tokenizer.ggml.tokens is missing"),
    ],
)
def test_gguf_that_cannot_be_served(tmp_path: Path, change: dict[str, object], words: str) -> None:
    metadata = gguf_metadata_of(trained_bpe(CHATML_SPECIALS), "smollm") | change
    with pytest.raises(CheckpointError, match=words):
        load_tokenizer(write_gguf(tmp_path / "tiny.gguf", metadata))
