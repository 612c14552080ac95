"""Writes a tiny LLaVA with random weights, for trying the image path without a download: `doctor --make-tiny-vlm`.

Its words are noise; everything else is as in a published checkpoint: CLIP tower, projector, Llama decoder, tokenizer,
chat template, image processor. Called by `server/doctor.py` in a process of its own; does not import torch.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Array = NDArray[np.float32]

_SEED = 20
_STD = 0.2
"""Wide enough that the next token depends clearly on text and picture."""

_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS = 64, 128, 2, 4, 2
_VISION_HIDDEN, _VISION_INNER, _VISION_LAYERS, _VISION_HEADS = 48, 96, 3, 4
_IMAGE, _PATCH = 56, 14
_CONTEXT = 4096

_PAD, _BEGIN, _END, _IMAGE_TOKEN = _SPECIALS = ("<pad>", "<s>", "</s>", "<image>")

_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] | upper }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\\n' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)

WARNING = "This model's weights are random and its words are noise: it shows that images go through, nothing more."


def write_tiny_vlm(folder: Path) -> None:
    """Write the checkpoint; the same files every time. Raises OSError, FileExistsError where the folder has files."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; name a folder that is new")
    tokenizer = _tokenizer()
    ids = {token: tokenizer.get_vocab()[token] for token in _SPECIALS}
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _PAD,
        "bos_token": _BEGIN,
        "eos_token": _END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _CONTEXT,
    }
    _write(folder / "tokenizer_config.json", tokenizer_config)
    _write(folder / "config.json", _config(ids, tokenizer.get_vocab_size()))
    _write(folder / "generation_config.json", {"eos_token_id": ids[_END], "pad_token_id": ids[_PAD]})
    _write(folder / "preprocessor_config.json", _image_processor())
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    weights = folder / "model.safetensors"
    save_file(dict(_weights(tokenizer)), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # the library makes it readable for its owner only


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _tokenizer() -> Tokenizer:
    """A token for each byte."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS])
    return tokenizer


def _config(ids: dict[str, int], vocab_size: int) -> dict[str, object]:
    special = {"pad_token_id": ids[_PAD], "bos_token_id": ids[_BEGIN], "eos_token_id": ids[_END]}
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "torch_dtype": "float32",
        "image_token_index": ids[_IMAGE_TOKEN],
        "image_seq_length": (_IMAGE // _PATCH) ** 2,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        **special,
        "text_config": {
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": _HIDDEN,
            "intermediate_size": _INNER,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _KV_HEADS,
            "max_position_embeddings": _CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            **special,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": _VISION_HIDDEN,
            "intermediate_size": _VISION_INNER,
            "num_hidden_layers": _VISION_LAYERS,
            "num_attention_heads": _VISION_HEADS,
            "image_size": _IMAGE,
            "patch_size": _PATCH,
        },
    }


def _image_processor() -> dict[str, object]:
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": _IMAGE},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": _IMAGE, "width": _IMAGE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def _weights(tokenizer: Tokenizer) -> Iterator[tuple[str, Array]]:
    """Matrices around 0, scales of norms around 1. Printable characters alone have an output: the noise is legible."""
    draw = np.random.default_rng(_SEED)
    vocab_size = tokenizer.get_vocab_size()
    for name, shape in _shapes(vocab_size):
        centre = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0
        values = (draw.standard_normal(shape, dtype=np.float32) * _STD + centre).astype(np.float32)
        if name == "language_model.lm_head.weight":
            printable = {tokenizer.token_to_id(chr(code)) for code in range(ord("!"), ord("~") + 1)}
            values[[index for index in range(vocab_size) if index not in printable]] = 0.0
        yield name, values


def _shapes(vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _vision_shapes()
    projector = "multi_modal_projector."
    yield from _linear(projector + "linear_1", _VISION_HIDDEN, _HIDDEN)
    yield from _linear(projector + "linear_2", _HIDDEN, _HIDDEN)
    language, head = "language_model.model.", _HIDDEN // _HEADS
    yield language + "embed_tokens.weight", (vocab_size, _HIDDEN)
    for layer in range(_LAYERS):
        prefix = f"{language}layers.{layer}."
        for name, width in (("q", _HEADS * head), ("k", _KV_HEADS * head), ("v", _KV_HEADS * head)):
            yield f"{prefix}self_attn.{name}_proj.weight", (width, _HIDDEN)
        yield prefix + "self_attn.o_proj.weight", (_HIDDEN, _HEADS * head)
        yield prefix + "mlp.gate_proj.weight", (_INNER, _HIDDEN)
        yield prefix + "mlp.up_proj.weight", (_INNER, _HIDDEN)
        yield prefix + "mlp.down_proj.weight", (_HIDDEN, _INNER)
        yield prefix + "input_layernorm.weight", (_HIDDEN,)
        yield prefix + "post_attention_layernorm.weight", (_HIDDEN,)
    yield language + "norm.weight", (_HIDDEN,)
    yield "language_model.lm_head.weight", (vocab_size, _HIDDEN)


def _vision_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    tower, width = "vision_tower.vision_model.", _VISION_HIDDEN
    yield tower + "embeddings.class_embedding", (width,)
    yield tower + "embeddings.patch_embedding.weight", (width, 3, _PATCH, _PATCH)
    yield tower + "embeddings.position_embedding.weight", ((_IMAGE // _PATCH) ** 2 + 1, width)
    yield from _norm(tower + "pre_layrnorm")
    for layer in range(_VISION_LAYERS):
        prefix = f"{tower}encoder.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{prefix}self_attn.{name}", width, width)
        yield from _norm(prefix + "layer_norm1")
        yield from _norm(prefix + "layer_norm2")
        yield from _linear(prefix + "mlp.fc1", width, _VISION_INNER)
        yield from _linear(prefix + "mlp.fc2", _VISION_INNER, width)
    yield from _norm(tower + "post_layernorm")


def _norm(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name + ".weight", (_VISION_HIDDEN,)
    yield name + ".bias", (_VISION_HIDDEN,)


def _linear(name: str, width_in: int, width_out: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name + ".weight", (width_out, width_in)
    yield name + ".bias", (width_out,)
