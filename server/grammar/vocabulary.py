"""The tokens of a model, as grammars need them. Made by `server/prompt/vocabulary.py`; used in all processes."""

from collections.abc import Mapping

import msgspec


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model."""

    tokens: list[bytes]
    """[V]: the bytes of each id, b"" for one that is only there to fill the model's matrix up."""
    special_ids: list[int]
    """Tokens that are no text."""
    eos_ids: list[int]
    """Those that end an output; at least one."""

    def special_literals(self) -> Mapping[str, int]:
        """How special tokens are spelled -> id."""
        return {self.tokens[token_id].decode(errors="replace"): token_id for token_id in self.special_ids}
