"""Reads a checkpoint's tokenizer: a Hugging Face folder or a GGUF file. API process, once at start; no torch.

A GGUF file names its pre-tokenizer instead of storing it (`tokenizer.ggml.pre`). Only names whose meaning is known
exactly are accepted: a wrong split gives wrong ids, silently.
"""

from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_file import GgufValue, read_gguf
from model_runtime.weights.json_file import read_json_if_any
from server.prompt.byte_level import cased_words, cut_by
from server.prompt.tiktoken_file import FILE as TIKTOKEN
from server.prompt.tiktoken_file import read_tiktoken

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_XTML_TYPE = "kimi_k3"
"""The `model_type` of checkpoints whose conversations are XTML."""
_CONTROL, _USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`."""

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
_GPT4O_SPLIT = cased_words(r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"\r\n/")
_DIGITS_THEN_GPT2 = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_GPT2 = ("gpt-2",)
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_GPT4O = ("gpt-4o",)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """What a checkpoint says about its tokenizer."""

    fast: tokenizers.Tokenizer
    """Special tokens are flagged; no truncation, no padding."""
    tokens: list[str]
    """Token of each id as the vocabulary spells it; "" where an id is unused."""
    chat_template: str | None
    special_variables: dict[str, str]
    """Names that templates know (`bos_token`, `eos_token`, ...) -> token."""
    writes_xtml: bool = False
    """There is no template, since conversations are what `server/prompt/xtml.py` writes."""


def read_source(model_path: Path) -> TokenizerSource:
    """From a folder with `tokenizer.json`, or Moonshot's `tiktoken.model`, or from a GGUF file. Raises
    CheckpointError."""
    return _from_gguf(model_path) if model_path.is_file() else _from_folder(model_path)


def _from_folder(folder: Path) -> TokenizerSource:
    config = read_json_if_any(folder / "special_tokens_map.json") | read_json_if_any(folder / "tokenizer_config.json")
    fast = _fast(folder, config)
    variables = {name: _content(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
    extra = config.get("additional_special_tokens") or []
    named = [*variables.values(), *map(_content, extra if isinstance(extra, list) else [])]
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _unflagged(fast, named)])
    template = _folder_template(folder, config)
    return TokenizerSource(
        fast=fast,
        tokens=_tokens_by_id(fast),
        chat_template=template,
        special_variables=variables,
        writes_xtml=template is None and read_json_if_any(folder / "config.json").get("model_type") == _XTML_TYPE,
    )


def _fast(folder: Path, config: dict[str, object]) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file() and (folder / TIKTOKEN).is_file():
        return read_tiktoken(folder, config)
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json and no {TIKTOKEN}, and no other file of a tokenizer is read; transformers "
            "makes one: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        fast = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from None
    fast.no_truncation()
    fast.no_padding()
    return fast


def _unflagged(fast: tokenizers.Tokenizer, named: list[str]) -> list[str]:
    """Tokens that the configuration calls special and the tokenizer does not flag. One that is not in the vocabulary
    has no embedding in the model and stays out of it."""
    flagged = {token.content for token in fast.get_added_tokens_decoder().values() if token.special}
    return [token for token in dict.fromkeys(named) if token not in flagged and fast.token_to_id(token) is not None]


def _content(token: object) -> str:
    """A token is configured as a string or as an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise CheckpointError(f"tokenizer_config.json: {token!r} is not a token")
    return content


def _tokens_by_id(fast: tokenizers.Tokenizer) -> list[str]:
    vocab = fast.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        tokens[token_id] = token
    return tokens


def _folder_template(folder: Path, config: dict[str, object]) -> str | None:
    """`chat_template.jinja`, else `chat_template.json`, else the entry of tokenizer_config.json (a string, or a list of
    named templates of which `default` is meant)."""
    if (path := folder / "chat_template.jinja").is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8 text: {error}") from None
    template = read_json_if_any(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _from_gguf(path: Path) -> TokenizerSource:
    metadata = read_gguf(path).metadata
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise CheckpointError(
            f"{path.name}: tokenizer model {model!r} is not supported (byte-level BPE, 'gpt2', is); "
            "use the checkpoint's Hugging Face folder"
        )
    tokens = _string_list(path, metadata, "tokenizer.ggml.tokens")
    variables = {
        f"{short}_token": tokens[token_id]
        for name, short in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"))
        if isinstance(token_id := metadata.get(f"tokenizer.ggml.{name}_token_id"), int) and 0 <= token_id < len(tokens)
    }
    template = metadata.get("tokenizer.chat_template")
    return TokenizerSource(
        fast=_bpe(path, metadata, tokens, variables),
        tokens=tokens,
        chat_template=template if isinstance(template, str) else None,
        special_variables=variables,
    )


def _bpe(
    path: Path, metadata: dict[str, GgufValue], tokens: list[str], variables: dict[str, str]
) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [merge.partition(" ") for merge in _string_list(path, metadata, "tokenizer.ggml.merges")]
    merges = [(left, right) for left, _, right in pairs]
    try:
        fast = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _LLAMA3))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise CheckpointError(f"{path.name}: the merges do not fit the vocabulary: {error}") from None
    fast.pre_tokenizer = _pre_tokenizer(path, pre)
    if pre in _QWEN2:
        fast.normalizer = normalizers.NFC()
    fast.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type")
    kinds = dict(enumerate(types)) if isinstance(types, list) else {}
    controls = [token for token_id, token in enumerate(tokens) if kinds.get(token_id) == _CONTROL]
    defined = [token for token_id, token in enumerate(tokens) if kinds.get(token_id) == _USER_DEFINED]
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    fast.add_tokens([AddedToken(token, normalized=False) for token in defined])
    before = variables.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3) else None
    after = variables.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token") else None
    around = {token: vocab[token] for token in (before, after) if token}
    if around:
        template = [*([before] if before else []), "$A", *([after] if after else [])]
        fast.post_processor = processors.TemplateProcessing(single=template, special_tokens=list(around.items()))
    return fast


def _pre_tokenizer(path: Path, pre: GgufValue | None) -> pre_tokenizers.PreTokenizer:
    """How text is cut into words before merging. Sources: the table of regular expressions in llama.cpp's
    src/llama-vocab.cpp, the tokenizer.json files of the models that it names, and tiktoken's o200k_base."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _GPT2:
        return gpt2
    if pre in _DIGITS_THEN_GPT2:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    splits = {_LLAMA3: _LLAMA3_SPLIT, _QWEN2: _QWEN2_SPLIT, _GPT4O: _GPT4O_SPLIT}
    split = next((split for names, split in splits.items() if pre in names), None)
    if split is None:
        known = ", ".join(_DIGITS_THEN_GPT2 + _GPT2 + _LLAMA3 + _QWEN2 + _GPT4O)
        raise CheckpointError(f"{path.name}: pre-tokenizer {pre!r} is not supported; known are {known}")
    return cut_by(split)


def _string_list(path: Path, metadata: dict[str, GgufValue], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise CheckpointError(f"{path.name}: {key} is missing")
    return [str(item) for item in value]
