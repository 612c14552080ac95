"""What the metadata of a GGUF file says of a vocabulary, whatever its tokenizer. API process, once at start; used by
`gguf_bpe.py`, `gguf_sentencepiece.py` and `source.py`.
"""

from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, processors

from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_file import GgufValue

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Values of `tokenizer.ggml.token_type`."""
NAMES = (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"))
"""What the metadata and templates call tokens."""


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Tokens by id, and what is said of them."""

    path: Path
    metadata: dict[str, GgufValue]
    tokens: list[str]

    def value(self, key: str, default: GgufValue | None = None) -> GgufValue | None:
        """Of a key under tokenizer.ggml."""
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def kinds(self) -> list[int]:
        """Of each token; all are normal where the file does not say. Raises CheckpointError for another number of
        them."""
        kinds, count = self.value("token_type"), len(self.tokens)
        if not isinstance(kinds, list):
            return [NORMAL] * count
        if len(kinds) != count:
            raise CheckpointError(
                f"{self.path.name}: {count} tokens have {len(kinds)} of tokenizer.ggml.token_type; they must be as many"
            )
        return [int(kind) for kind in kinds]

    def named(self, defaults: dict[str, int]) -> dict[str, str]:
        """Names that templates know -> token. `defaults` are ids by the metadata's names."""
        ids = {short: self.value(f"{name}_token_id", defaults.get(name)) for name, short in NAMES}
        return {
            f"{short}_token": self.tokens[token_id]
            for short, token_id in ids.items()
            if isinstance(token_id, int) and 0 <= token_id < len(self.tokens)
        }


def strings(path: Path, metadata: dict[str, GgufValue], key: str) -> list[str]:
    """A list under tokenizer.ggml. Raises CheckpointError where it is missing."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise CheckpointError(f"{path.name}: tokenizer.ggml.{key} is missing")
    return [str(item) for item in value]


def add_tokens(
    fast: tokenizers.Tokenizer, special: list[str], defined: list[str], stripping: frozenset[str] = frozenset()
) -> None:
    """Tokens that are found in a text before it is cut; white space behind the `stripping` ones belongs to them."""
    fast.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=token in stripping) for token in special]
    )
    fast.add_tokens([AddedToken(token, normalized=False, rstrip=token in stripping) for token in defined])


def wrap(fast: tokenizers.Tokenizer, before: str | None, after: str | None) -> None:
    """The tokens that stand around a text."""
    around = {token: fast.token_to_id(token) for token in (before, after) if token}
    if around:
        template = [*([before] if before else []), "$A", *([after] if after else [])]
        fast.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(around.items()))
