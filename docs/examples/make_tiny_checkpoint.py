"""Writes a tiny Qwen3 with random weights and a tokenizer of bytes, to try commands with: needs transformers.

python docs/examples/make_tiny_checkpoint.py FOLDER
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

folder = Path(sys.argv[1])
symbols = ("<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()))
tokenizer = Tokenizer(BPE({symbol: index for index, symbol in enumerate(symbols)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
config = Qwen3Config(
    vocab_size=len(symbols),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    eos_token_id=2,
)
Qwen3ForCausalLM(config).save_pretrained(folder)
template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=template
).save_pretrained(folder)
print(folder)
