"""Writes a tiny Arcee model with random weights, as transformers saves one, to follow docs/new-model.md with.

python make_tiny.py FOLDER
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import ArceeConfig, ArceeForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Three special tokens, then one token a byte."""
    symbols = (*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(BPE({symbol: index for index, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], chat_template=TEMPLATE)
    fast.save_pretrained(folder)


def write_model(folder: Path) -> None:
    """Weights are wide enough that logits differ clearly; transformers begins with ones that are too small."""
    config = ArceeConfig(
        vocab_size=len(SPECIAL) + 256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = ArceeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
    write_tokenizer(Path(sys.argv[1]))
