"""Writes server/validate/embedded_logprobs.json: what transformers says of a text with the embedded model's weights, in
float64. `python -m tests.server.record_logprobs`, once for each embedded model; some seconds.
"""

import msgspec
import torch

from server.embedded import embedded_path
from server.prompt.tokenizer import load_tokenizer
from server.quality_command import TEXT
from server.validate.known import RECORDED, Recorded
from tests.model_runtime.smollm2 import transformers_model

TOKENS = 400


def main() -> None:
    """The command."""
    tokenizer = load_tokenizer(embedded_path())
    text = TEXT.read_text(encoding="utf-8")
    ids = list(tokenizer.encode(text, add_special_tokens=False, allow_special=False))[:TOKENS]
    with torch.inference_mode():
        logprobs_TV = transformers_model()(torch.tensor([ids])).logits[0].log_softmax(-1)
    logprobs = [round(float(row_V[token]), 5) for row_V, token in zip(logprobs_TV[:-1], ids[1:], strict=True)]
    RECORDED.write_bytes(msgspec.json.encode(Recorded(token_ids=ids, logprobs=logprobs)) + b"\n")


if __name__ == "__main__":
    main()
