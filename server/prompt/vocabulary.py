"""From a tokenizer to the vocabulary that grammars work on. Used by the API and the engine process; no torch."""

from collections.abc import Sequence

from server.grammar.errors import GrammarError
from server.grammar.vocabulary import Vocabulary
from server.prompt.tokenizer import Tokenizer


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> Vocabulary:
    """`vocab_size` is that of the model's logits. Raises GrammarError for a model that cannot end an output."""
    if not eos_ids:
        raise GrammarError("the model has no token that ends an output")
    return Vocabulary(
        tokens=[tokenizer.token_bytes(token_id) for token_id in range(vocab_size)],
        special_ids=sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size),
        eos_ids=list(eos_ids),
    )
