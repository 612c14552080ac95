"""BPE of SentencePiece (arXiv 1808.06226) of a GGUF file, of whose tokenizers this is the model 'llama': Llama 2,
Mistral, Phi-3, Gemma. API process, once at start.

Of all neighbours in a text, those are joined first that make the piece with the best score; characters that are no
piece become the tokens of their bytes. The file has no merges: they are all ways to make a piece of two others, the
best piece first. As llama.cpp reads such files (src/llama-vocab.cpp), text behind every special token begins with a
space, if texts do.
"""

import tokenizers
from tokenizers import decoders, models, normalizers

from model_runtime.weights.errors import CheckpointError
from server.prompt.gguf_vocabulary import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    GgufVocabulary,
    add_tokens,
    wrap,
)

DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""Of tokens that a file does not name."""
_SPACE = "▁"
_PHI3_LINE_KEEPERS = frozenset(("<unk>", "<s>", "<|endoftext|>"))
"""Of Phi-3's added tokens, which have the white space behind them, those that have not; files do not say."""


def sentencepiece_bpe(vocabulary: GgufVocabulary, variables: dict[str, str]) -> tokenizers.Tokenizer:
    """Raises CheckpointError for a vocabulary without scores, or that SentencePiece would not read as BPE."""
    tokens, unknown = vocabulary.tokens, variables.get("unk_token")
    kinds = vocabulary.kinds()
    pieces = _pieces(vocabulary, kinds)
    if vocabulary.value("remove_extra_whitespaces") or vocabulary.value("precompiled_charsmap"):
        raise CheckpointError(
            f"{vocabulary.path.name}: its tokenizer changes texts before it cuts them, which is not supported; use the "
            "checkpoint's Hugging Face folder"
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    model = models.BPE(vocab, _merges(pieces), unk_token=unknown, byte_fallback=True, fuse_unk=True)
    fast = tokenizers.Tokenizer(model)
    has_prefix = bool(vocabulary.value("add_space_prefix", True))
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    fast.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    fast.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    named = set(variables.values())
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, UNKNOWN) or t in named]
    defined = [t for t, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED and t not in named]
    add_tokens(fast, special, defined, _stripping(vocabulary, [*special, *defined]))
    before = variables.get("bos_token") if vocabulary.value("add_bos_token", True) else None
    wrap(fast, before, variables.get("eos_token") if vocabulary.value("add_eos_token") else None)
    return fast


def _pieces(vocabulary: GgufVocabulary, kinds: list[int]) -> dict[str, float]:
    """The score of each piece that text may be made of, the best first."""
    scores, tokens = vocabulary.value("scores"), vocabulary.tokens
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{vocabulary.path.name}: tokenizer.ggml.scores must hold {len(tokens)} numbers")
    found = {
        token: float(score)
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
        if isinstance(score, int | float) and kind in (NORMAL, USER_DEFINED)
    }
    joined = [score for token, score in found.items() if len(token) > 1]
    if len(joined) > 1 and min(joined) == max(joined):
        raise CheckpointError(
            f"{vocabulary.path.name}: all scores of its vocabulary are {joined[0]:g}, which does not tell how text is "
            "cut; use the checkpoint's Hugging Face folder"
        )
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _merges(pieces: dict[str, float]) -> list[tuple[str, str]]:
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _stripping(vocabulary: GgufVocabulary, added: list[str]) -> frozenset[str]:
    is_phi3 = vocabulary.metadata.get("general.architecture") == "phi3"
    return frozenset(added) - _PHI3_LINE_KEEPERS if is_phi3 else frozenset()
