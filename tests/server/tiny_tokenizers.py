"""Tiny tokenizers of the kinds that checkpoints have, written as Hugging Face folders or GGUF files, and texts to try
them with."""

import json
import struct
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from server.prompt.tokenizer import MARK

CORPUS = [
    "The capital of France is Paris. What is the capital of France?",
    "def f(x): return x + 1  # 123 tokens of text, and the text of tokens",
    "You're here, they've gone; I'll see what he'd say. The end is the start.",
]
CHATML_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% endif %}{% endfor %}"
)
TEXTS = st.text(max_size=40) | st.lists(
    st.sampled_from(
        ["the ", "  ", " 12", "1", "é", "\n\n", "France", "<s>", "<|im_end|>", "'ll", "👩‍👩‍👧", "\t", MARK]
    ),
    max_size=12,
).map("".join)


def trained_bpe(specials: list[str], *, size: int = 400) -> Tokenizer:
    """Byte-level BPE as GPT-2's; special tokens have the first ids."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(CORPUS, trainer)
    return fast


def sentencepiece_bpe(*, legacy: bool) -> Tokenizer:
    """Byte-fallback BPE as Llama 2's (legacy: each text between special tokens gets a space) or as converted since
    (only the first does)."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzTWF.?!,><[]/|_IN"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "F"), ("r", "a"), ("▁F", "ra"), ("▁", "▁"), ("i", "s")]
    pieces += [left + right for left, right in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    fast = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if legacy:
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]])
    fast.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return fast


def save_folder(folder: Path, fast: Tokenizer, config: dict[str, object]) -> Path:
    """`tokenizer.json` and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def chatml_folder(folder: Path, **config: object) -> Path:
    """A byte-level tokenizer with the ChatML template."""
    fast = trained_bpe(CHATML_SPECIALS)
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    return save_folder(folder, fast, named | config)


def gguf_metadata_of(fast: Tokenizer, pre: str) -> dict[str, object]:
    """What a GGUF file says about a byte-level tokenizer."""
    parts = json.loads(fast.to_str())
    vocab: dict[str, int] = parts["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {token["content"] for token in parts["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in parts["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece_metadata(**changes: object) -> dict[str, object]:
    """What a GGUF file says about a SentencePiece vocabulary with the pieces of a small text, as Llama 2's: the special
    tokens, the bytes, what was joined in the order in which it was, single characters."""
    fast = Tokenizer(models.BPE())
    fast.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    fast.train_from_iterator([*CORPUS, "a  b   c    d aaaa", "ababab   \t  é"], trainer)
    vocab: dict[str, int] = json.loads(fast.to_str())["model"]["vocab"]
    ordered = sorted(vocab, key=vocab.__getitem__)
    pieces = [piece for piece in ordered if len(piece) > 1] + [piece for piece in ordered if len(piece) == 1]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    metadata: dict[str, object] = {
        "model": "llama",
        "pre": "default",
        "tokens": first + pieces,
        "scores": [0.0] * len(first) + [-float(rank) for rank in range(len(pieces))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items()}


def write_gguf(path: Path, metadata: dict[str, object]) -> Path:
    """A GGUF file of version 3 with metadata and no tensors."""
    head = struct.pack("<IIQQ", int.from_bytes(b"GGUF", "little"), 3, 0, len(metadata))
    path.write_bytes(head + b"".join(_string(key) + _value(value) for key, value in metadata.items()))
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: object) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        case [float(), *_]:
            return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
        case [int(), *_]:
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    raise TypeError(type(value))
