"""Tiny seeded vision-language checkpoints as Hugging Face writes them: weights, tokenizer, chat template, processor.

`make_vlm(folder, name)` writes one of `VLMS` (`tests/vlm_cases.py`) and returns transformers' model;
`tests/vlm_oracle.py` says what it answers.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel, PreTrainedTokenizerFast

from tests.vlm_cases import CASES, HIDDEN, Values, Vlm

TEXT: Values = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}
"""The language model of every checkpoint."""


def make_tokenizer(case: Vlm) -> PreTrainedTokenizerFast:
    """One token a byte, one for two line breaks, then the special tokens, as families add them behind a vocabulary."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ"]
    inner = Tokenizer(BPE({symbol: index for index, symbol in enumerate(symbols)}, [("Ċ", "Ċ")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in case.tokens])
    pad, begin, end = case.tokens[:3]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=pad, bos_token=begin, eos_token=end, chat_template=case.template
    )


def make_model(case: Vlm, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The model with its weights redrawn: scales around 1, the rest around 0."""
    torch.manual_seed(case.seed)
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in case.ids.items()}
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    text = {**TEXT, "vocab_size": len(tokenizer), **special, **case.text}
    config = AutoConfig.for_model(
        case.family, **{**case.config, **ids, "text_config": text, "vision_config": dict(case.vision)}
    )
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        drawn = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if "correction_bias" in n)]
        for name, tensor in drawn:
            is_scale = tensor.dim() == 1 and name.endswith("weight")
            tensor.copy_(torch.randn_like(tensor) * 0.2 + (1.0 if is_scale else 0.0))
        image_token_id = next(ids[key] for key in ids if key.startswith("image_token"))
        # never the most likely: transformers would want another picture for an image token that was generated
        model.get_output_embeddings().weight[image_token_id] = 0.0
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def make_vlm(folder: Path, name: str, text: Values | None = None) -> PreTrainedModel:
    """Write the checkpoint `name` to a folder, and return its model (float32); `text` changes its language model."""
    case = replace(CASES[name], text={**CASES[name].text, **(text or {})})
    tokenizer = make_tokenizer(case)
    model = make_model(case, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    values = case.processor if isinstance(case.processor, Mapping) else case.processor.to_dict()
    if case.nested:
        (folder / "processor_config.json").write_text(json.dumps({"image_processor": values}))
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(values))
    return model
