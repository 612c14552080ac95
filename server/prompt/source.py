"""Reads a checkpoint's tokenizer: a Hugging Face folder or a GGUF file. API process, once at start; no torch."""

from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from model_runtime.weights.errors import CheckpointError
from model_runtime.weights.gguf_file import read_gguf
from model_runtime.weights.json_file import read_json_if_any
from server.prompt.gguf_bpe import byte_level_bpe
from server.prompt.gguf_sentencepiece import DEFAULT_IDS, sentencepiece_bpe
from server.prompt.gguf_vocabulary import GgufVocabulary, strings
from server.prompt.tiktoken_file import FILE as TIKTOKEN
from server.prompt.tiktoken_file import read_tiktoken

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_XTML_TYPE = "kimi_k3"
"""The `model_type` of checkpoints whose conversations are XTML."""


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
    if model not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{path.name}: tokenizer model {model!r} is not supported (byte-level BPE, 'gpt2', and SentencePiece's, "
            "'llama', are); use the checkpoint's Hugging Face folder"
        )
    vocabulary = GgufVocabulary(path, metadata, strings(path, metadata, "tokens"))
    variables = vocabulary.named(DEFAULT_IDS if model == "llama" else {})
    template = metadata.get("tokenizer.chat_template")
    return TokenizerSource(
        fast=(sentencepiece_bpe if model == "llama" else byte_level_bpe)(vocabulary, variables),
        tokens=vocabulary.tokens,
        chat_template=template if isinstance(template, str) else None,
        special_variables=variables,
    )
