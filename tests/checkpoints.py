"""Makes tiny seeded checkpoints as Hugging Face writes them: config, safetensors, tokenizer, chat template.

Used by the tests of the runtime (compared with transformers) and of the server (something small to serve).
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLASSES = {
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
}
HYBRID: dict[str, object] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
"""What a small qwen3_next has apart from the others: layers with states, and experts."""
SMALL: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Three special tokens, then one token a byte."""
    symbols = (*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(BPE({symbol: index for index, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def make_model(family: str, overrides: dict[str, object], seed: int = 0) -> PreTrainedModel:
    """A float32 model with weights wide enough that its logits differ clearly; norms and biases are random too."""
    config_class, model_class = CLASSES[family]
    model = model_class(config_class(**(SMALL | overrides))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name else 0.0
            parameter.normal_(center, 0.2, generator=generator)
    return model


def make_checkpoint(
    folder: Path,
    family: str,
    overrides: dict[str, object],
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
) -> PreTrainedModel:
    """Write model, tokenizer and chat template to a folder, and return the model; a small max_shard_size such as
    '40KB' splits the weights into several files."""
    model = make_model(family, overrides).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    make_tokenizer().save_pretrained(folder)
    return model
