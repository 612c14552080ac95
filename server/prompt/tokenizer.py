"""The model's tokenizer: text to ids and ids to true bytes. Loaded once in the API process; does not import torch.

Text comes from two sides. The template's (and a raw completion prompt's) special tokens become single ids; a user's
never do. For that a second tokenizer shares the vocabulary of the first but knows each special token under an *alias*
(MARK and a private-use character) only, so that a literal such as `<|im_end|>` is ordinary text to it. Text is encoded
in one call either way, hence spaces, merges and normalizers behave as in the plain Hugging Face tokenizer.
"""

import asyncio
import re
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import tokenizers

from model_runtime.weights.errors import CheckpointError
from scheduler.plan import ints
from server.prompt.byte_level import byte_level_alphabet
from server.prompt.source import TokenizerSource, read_source

MARK = "\ufdd0"
"""A noncharacter (Unicode 23.7); begins every alias. Where a text spells an alias, its MARK gets an alias too, and it
stays text."""

Piece: TypeAlias = str | int
"""Of a prompt: a text, in which literals of special tokens are text, or a token id."""

_FIRST_ALIAS = 0xF0000
_FORGED = MARK + "(?=[\ufdd1-\ufdef]*[\U000f0000-\U000fffff])"
"""What would be an alias, now or without breakers (`server/prompt/special.py`)."""
_THREAD_CHARS = 16_384
"""Longer texts (about 10 ms of work) are encoded in a thread; the library releases the interpreter lock meanwhile."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def load_tokenizer(model_path: Path) -> "Tokenizer":
    """The tokenizer of a Hugging Face folder or of a GGUF file. Raises CheckpointError."""
    return Tokenizer(read_source(model_path))


class Tokenizer:
    """Immutable after construction and safe to use from several threads."""

    def __init__(self, source: TokenizerSource) -> None:
        """Raises CheckpointError when the bytes of tokens cannot be told."""
        self.chat_template, self.writes_xtml = source.chat_template, source.writes_xtml
        self.special_variables = source.special_variables
        self._fast = source.fast
        self._added = dict(sorted(source.fast.get_added_tokens_decoder().items()))
        self.special_ids = frozenset(id for id, token in self._added.items() if token.special)
        self._bytes, self._drops_leading_space = _all_token_bytes(source.fast, source.tokens, self._added)
        self.max_token_bytes = max(map(len, self._bytes))
        self._prefix, self._suffix = _wrapping(source.fast)
        self._build_aliases()

    def _build_aliases(self) -> None:
        plain = tokenizers.Tokenizer(self._fast.model)
        plain.normalizer = self._fast.normalizer
        plain.pre_tokenizer = self._fast.pre_tokenizer
        alias_of = {MARK: MARK + chr(_FIRST_ALIAS)}
        spelled: list[tuple[int, str]] = []
        for index, (token_id, token) in enumerate(self._added.items(), start=1):
            content = token.content
            if token.special:
                content = alias_of[token.content] = MARK + chr(_FIRST_ALIAS + index)
            plain.add_tokens([_added_token(token, content)])
            spelled.append((token_id, content))
        plain.add_special_tokens([tokenizers.AddedToken(alias_of[MARK], special=True, normalized=False)])
        self._plain, self._alias_of = plain, alias_of
        self._replacements = {_id_in(plain, content): ints([token_id]) for token_id, content in spelled}
        self._replacements |= {_id_in(plain, alias_of[MARK]): ints(_raw_ids(plain, MARK))}
        self._replacements |= self._spelled_out()
        patterns = [alternation(set(self.special_literals)), _FORGED]
        self._literals = re.compile("|".join(filter(None, patterns)))

    def _spelled_out(self) -> "dict[int, array[int]]":
        """Special tokens that the vocabulary also holds as ordinary entries, which text might therefore reach by
        itself -> ids of their text in two pieces. The unknown token is left alone: text may produce it."""
        unknown = self._plain.encode("\U0010fffd", add_special_tokens=False).ids
        found: dict[int, array[int]] = {}
        for token_id in self.special_ids.difference(unknown):
            content = self._added[token_id].content
            if self._plain.token_to_id(content) == token_id:
                ids = _raw_ids(self._plain, content[:1]) + _raw_ids(self._plain, content[1:])
                found[token_id] = ints([id for id in ids if id not in self.special_ids])
        return found

    @property
    def vocab_size(self) -> int:
        """Ids are 0 .. vocab_size - 1."""
        return len(self._bytes)

    @property
    def special_literals(self) -> list[str]:
        """The texts of all special tokens."""
        return [token.content for token in self._added.values() if token.special]

    def id_of(self, token: str) -> int | None:
        """Id of a token as the vocabulary spells it."""
        return self._fast.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which is no part of a text."""
        return token_id in self.special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The true bytes of a token: possibly part of a character; of a special token its literal; b"" for an id that
        no token has (models pad their vocabularies)."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """The token for display; part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def encode(self, text: str, *, add_special_tokens: bool, allow_special: bool) -> "array[int]":
        """int32 ids. `add_special_tokens` adds what the model expects around a text (such as a BOS). With
        `allow_special`, literals of special tokens become their ids, else they are text."""
        if allow_special:
            return ints(self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        ids = self._resolved(re.sub(_FORGED, self._alias_of[MARK], text))
        return self._prefix + ids + self._suffix if add_special_tokens else ids

    def encode_rendered(self, text: str, breaker: str, *, add_special_tokens: bool = False) -> "array[int]":
        """int32 ids of a rendered template in which `breaker` interrupts each special literal that is not the
        template's own: those are text, the template's are special, `breaker` itself vanishes."""
        aliased = self._literals.sub(lambda match: self._alias_of[match[0]], text)
        ids = self._resolved(aliased.replace(breaker, ""))
        return self._prefix + ids + self._suffix if add_special_tokens else ids

    def encode_pieces(self, pieces: Iterable[Piece], *, add_special_tokens: bool) -> "array[int]":
        """int32 ids of texts that are encoded each by itself, with the ids between them. Most pieces are the same few
        names and signs: each is encoded once."""
        ids = ints()
        known: dict[str, array[int]] = {}
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
                continue
            found = known.get(piece)
            if found is None:
                found = known[piece] = self.encode(piece, add_special_tokens=False, allow_special=False)
            ids += found
        return self._prefix + ids + self._suffix if add_special_tokens else ids

    async def encode_async(self, text: str, *, add_special_tokens: bool, allow_special: bool) -> "array[int]":
        """`encode` that never holds the event loop for long."""
        if len(text) <= _THREAD_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens, allow_special=allow_special)
        return await asyncio.to_thread(
            self.encode, text, add_special_tokens=add_special_tokens, allow_special=allow_special
        )

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD. SentencePiece vocabularies begin a text
        with a space that is not part of it; it is dropped."""
        kept = [id for id in ids if not (skip_special_tokens and id in self.special_ids)]
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        return text[1:] if self._drops_leading_space and text.startswith(" ") else text

    def _resolved(self, aliased: str) -> "array[int]":
        """ids of an aliased text, with the aliases turned into the tokens that they stand for."""
        ids = self._plain.encode_batch_fast([aliased], add_special_tokens=False)[0].ids
        if self._replacements.keys().isdisjoint(ids):
            return ints(ids)
        resolved = ints()
        for token_id in ids:
            replacement = self._replacements.get(token_id)
            if replacement is None:
                resolved.append(token_id)
            else:
                resolved.extend(replacement)
        return resolved


def _raw_ids(plain: tokenizers.Tokenizer, text: str) -> list[int]:
    return plain.encode(text, add_special_tokens=False).ids if text else []


def _id_in(plain: tokenizers.Tokenizer, content: str) -> int:
    token_id = plain.token_to_id(content)
    if token_id is None:
        raise CheckpointError(f"the tokenizer does not take {content!r} as an added token")
    return token_id


def _added_token(token: tokenizers.AddedToken, content: str) -> tokenizers.AddedToken:
    """The same token under another spelling. An alias is matched wherever it stands and before normalization."""
    return tokenizers.AddedToken(
        content,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word and not token.special,
        normalized=token.normalized and not token.special,
        special=token.special,
    )


def alternation(words: set[str]) -> str:
    """A regular expression for any of the words, the longest first, that tries each character once: a text full of
    beginnings of a thousand special tokens must not take a thousand times as long."""
    tails: dict[str, set[str]] = {}
    for word in words:
        if word:
            tails.setdefault(word[0], set()).add(word[1:])
    branches = [re.escape(head) + alternation(rest) for head, rest in sorted(tails.items())]
    if not branches:
        return ""
    if len(branches) == 1 and "" not in words:
        return branches[0]
    return f"(?:{'|'.join(branches)})" + ("?" if "" in words else "")


def _wrapping(fast: tokenizers.Tokenizer) -> "tuple[array[int], array[int]]":
    """The ids that the tokenizer puts before and after a text."""
    inner = fast.encode("a", add_special_tokens=False).ids
    outer = fast.encode("a", add_special_tokens=True).ids
    for start in range(len(outer) - len(inner) + 1):
        if outer[start : start + len(inner)] == inner:
            return ints(outer[:start]), ints(outer[start + len(inner) :])
    raise CheckpointError("the tokenizer's post-processor changes the text's own tokens; this is not supported")


def _all_token_bytes(
    fast: tokenizers.Tokenizer, tokens: list[str], added: dict[int, tokenizers.AddedToken]
) -> tuple[list[bytes], bool]:
    """(bytes of each id, whether the decoder drops a text's leading space). What the decoder does is found by trying
    it: byte-level BPE spells each byte as a character, SentencePiece spells a space as U+2581 and bytes as <0x0A>."""
    decoder = fast.decoder
    if decoder is not None and decoder.decode(["Ġ"]) == " ":
        table = byte_level_alphabet()
        found = [_byte_level_bytes(token, table) for token in tokens]
        found = [added[id].content.encode() if id in added else value for id, value in enumerate(found)]
        return found, False
    if decoder is not None and decoder.decode(["a", "▁b"]) == "a b":
        has_byte_tokens = decoder.decode(["a", "<0x42>"]) == "aB"
        return [_sentencepiece_bytes(token, has_byte_tokens) for token in tokens], decoder.decode(["▁b"]) == "b"
    raise CheckpointError("the tokenizer's decoder is neither byte-level nor SentencePiece; it is not supported")


def _byte_level_bytes(token: str, alphabet: dict[str, int]) -> bytes:
    """A token with characters outside the alphabet is not spelled in it; its bytes are its UTF-8."""
    try:
        return bytes(map(alphabet.__getitem__, token))
    except KeyError:
        return token.encode()


def _sentencepiece_bytes(token: str, has_byte_tokens: bool) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
