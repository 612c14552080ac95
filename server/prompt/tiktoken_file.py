"""Reads `tiktoken.model`, which Moonshot's checkpoints (Kimi K2, K3, Linear, VL) have in place of a tokenizer.json. API
process, once at start; no torch.

Each line is a token's bytes in base64 and its rank, which is its id: pieces of a text are merged in the order of ranks.
How a text is cut before that, and which ids are special, is Python code in the checkpoint, which is never run here;
only files that name the code that this module knows are read. (That code also cuts runs of more than 25 000 characters
without white space, before all else; here they stay whole.)
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models

from model_runtime.weights.errors import CheckpointError
from server.prompt.byte_level import byte_level_alphabet, cased_words, cut_by

FILE = "tiktoken.model"
KNOWN_CODE = ("tokenization_kimi.", "tokenization_moonshot.")
NUM_SPECIAL = 256
"""Ids behind the last rank."""
_LARGE, _SMALL = (rf"[{case}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for case in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
SPLIT = r"[\p{Han}]+|" + cased_words(_LARGE, _SMALL, r"\r\n")
"""GPT-4o's, but that Chinese characters are apart, and a slash is no end of a line."""


def read_tiktoken(folder: Path, config: Mapping[str, object]) -> tokenizers.Tokenizer:
    """`config` is tokenizer_config.json. Raises CheckpointError."""
    _check_code(folder, config)
    spelling = {byte: character for character, byte in byte_level_alphabet().items()}
    ranks = _ranks(folder / FILE)

    def spelled(token: bytes) -> str:
        return "".join(map(spelling.__getitem__, token))

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = ((token[:end], token[end:]) for end in range(1, len(token)))
        known = [part for part in parts if part[0] in ranks and part[1] in ranks]
        known.sort(key=lambda part: (ranks[part[0]], ranks[part[1]]))
        merges += [(spelled(left), spelled(right)) for left, right in known]
    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    fast = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    fast.pre_tokenizer = cut_by(SPLIT)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(_special(config, len(ranks)))
    return fast


def _check_code(folder: Path, config: Mapping[str, object]) -> None:
    code = config.get("auto_map")
    named = str(code.get("AutoTokenizer")) if isinstance(code, Mapping) else ""
    if not any(known in named for known in KNOWN_CODE):
        known_files = ", ".join(f"{known}py" for known in KNOWN_CODE)
        raise CheckpointError(
            f"{folder / FILE}: auto_map in tokenizer_config.json names none of {known_files}, so how texts are cut is "
            "not known: make a tokenizer.json"
        )


def _ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().split(b"\n"):
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if sorted(ranks.values()) != [*range(len(ranks))] or any(bytes([byte]) not in ranks for byte in range(256)):
        raise CheckpointError(f"{path}: ranks are not 0 to {len(ranks) - 1}, or a byte has none")
    return ranks


def _special(config: Mapping[str, object], first: int) -> list[AddedToken]:
    """In the order of ids: as tokenizer_config.json calls them, or reserved."""
    named = config.get("added_tokens_decoder")
    named = named if isinstance(named, Mapping) else {}
    tokens = []
    for token_id in range(first, first + NUM_SPECIAL):
        token = named.get(str(token_id))
        content = token.get("content") if isinstance(token, Mapping) else f"<|reserved_token_{token_id}|>"
        if not isinstance(content, str) or not content:
            raise CheckpointError(f"tokenizer_config.json: token {token_id} has the content {content!r}")
        tokens.append(AddedToken(content, special=True, normalized=False))
    if len({token.content for token in tokens}) < NUM_SPECIAL:
        raise CheckpointError("tokenizer_config.json: two special tokens have the same content")
    return tokens
