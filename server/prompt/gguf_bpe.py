"""Byte-level BPE of a GGUF file, of whose tokenizers this is the model 'gpt2'. API process, once at start.

The file names its pre-tokenizer instead of storing it (`tokenizer.ggml.pre`). Only names whose meaning is known exactly
are accepted: a wrong split gives wrong ids, silently. Sources: the table of regular expressions in llama.cpp's
src/llama-vocab.cpp, the tokenizer.json files of the models that it names, and tiktoken's o200k_base.
"""

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_file import GgufValue
from server.prompt.byte_level import cased_words, cut_by
from server.prompt.gguf_vocabulary import CONTROL, USER_DEFINED, GgufVocabulary, add_tokens, strings, wrap

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
_SEED_SPLIT = _QWEN2_SPLIT.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+", 1)
_LARGE, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O_SPLIT = cased_words(_LARGE, _SMALL, r"\r\n/")
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LARGE}*{_SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{_LARGE}+{_SMALL}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3_SPLITS = (
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DIGITS_THEN_GPT2 = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_NEOX = ("olmo",)
_GPT2 = ("gpt-2", "exaone4", *_NEOX)
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe")
_CL100K = ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_SEED = ("seed-coder",)
_GPT4O = ("gpt-4o", "llama4")
_TEKKEN = ("tekken",)
_DEEPSEEK3 = ("deepseek-v3",)
_KNOWN = _DIGITS_THEN_GPT2 + _GPT2 + _LLAMA3 + _CL100K + _QWEN2 + _SEED + _GPT4O + _TEKKEN + _DEEPSEEK3
_WHOLE_WORDS_FIRST = _LLAMA3 + _TEKKEN
"""A word that is a token is not made of merges; these tokenizers also put a bos before a text unless the file says."""


def byte_level_bpe(vocabulary: GgufVocabulary, variables: dict[str, str]) -> tokenizers.Tokenizer:
    """Raises CheckpointError for merges that do not fit, and for an unknown pre-tokenizer."""
    pre, tokens = vocabulary.value("pre"), vocabulary.tokens
    pairs = [merge.partition(" ") for merge in strings(vocabulary.path, vocabulary.metadata, "merges")]
    merges = [(left, right) for left, _, right in pairs]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        fast = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise CheckpointError(f"{vocabulary.path.name}: the merges do not fit the vocabulary: {error}") from None
    pre_tokenizer = _pre_tokenizer(pre)
    if pre_tokenizer is None:
        raise CheckpointError(
            f"{vocabulary.path.name}: pre-tokenizer {pre!r} is not supported; known are {', '.join(_KNOWN)}"
        )
    fast.pre_tokenizer = pre_tokenizer
    if pre in _QWEN2 + _NEOX:
        fast.normalizer = normalizers.NFC()
    fast.decoder = decoders.ByteLevel()
    kinds = dict(zip(tokens, vocabulary.kinds(), strict=True))
    controls, defined = ([token for token in tokens if kinds[token] == kind] for kind in (CONTROL, USER_DEFINED))
    add_tokens(fast, controls, defined)
    before = variables.get("bos_token") if vocabulary.value("add_bos_token", pre in _WHOLE_WORDS_FIRST) else None
    wrap(fast, before, variables.get("eos_token") if vocabulary.value("add_eos_token") else None)
    return fast


def _pre_tokenizer(pre: GgufValue | None) -> pre_tokenizers.PreTokenizer | None:
    """How text is cut into words before merging."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _GPT2:
        return gpt2
    if pre in _DIGITS_THEN_GPT2:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if pre in _DEEPSEEK3:
        *first, last = _DEEPSEEK3_SPLITS
        cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in first]
        return pre_tokenizers.Sequence([*cuts, cut_by(last)])
    splits = {
        _LLAMA3 + _CL100K: _LLAMA3_SPLIT,
        _QWEN2: _QWEN2_SPLIT,
        _SEED: _SEED_SPLIT,
        _GPT4O: _GPT4O_SPLIT,
        _TEKKEN: _TEKKEN_SPLIT,
    }
    split = next((split for names, split in splits.items() if pre in names), None)
    return None if split is None else cut_by(split)
