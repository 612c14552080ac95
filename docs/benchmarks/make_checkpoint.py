"""Writes a GGUF file as a Hugging Face folder, for engines that read only those.

`python docs/benchmarks/make_checkpoint.py MODEL.gguf FOLDER float32|bfloat16`, in the project's own environment, which
has transformers and gguf. transformers expands the quantised weights, so all engines compute with the same numbers.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def main() -> None:
    """Read, expand, write."""
    file, folder, dtype = Path(sys.argv[1]), Path(sys.argv[2]), getattr(torch, sys.argv[3])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    left = model.load_state_dict(tensors, strict=False)
    assert not left.unexpected_keys and set(left.missing_keys) <= {"lm_head.weight"}, left
    model.tie_weights()
    model.to(dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    main()
