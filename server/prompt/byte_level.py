"""Byte-level spelling: how bytes are written as characters of tokens, and how a text is cut before its pieces are
merged. API process, once at start; used where a tokenizer is made of something else than a tokenizer.json.
"""

from tokenizers import Regex, pre_tokenizers

_ENDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level spelling: printable Latin-1 stands for itself, the other 68 bytes for
    U+0100, U+0101, ... in order (`bytes_to_unicode` in GPT-2's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def cut_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Pieces are what the pattern matches, and what is between matches."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def cased_words(large: str, small: str, line_ends: str) -> str:
    """GPT-4o's pattern (tiktoken's o200k_base): in a word small letters follow large ones. `line_ends` may follow
    punctuation."""
    return "|".join(
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?{large}*{small}+{_ENDS}",
            rf"[^\r\n\p{{L}}\p{{N}}]?{large}+{small}*{_ENDS}",
            rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[{line_ends}]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    )
