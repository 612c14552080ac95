"""Rates of transformers' `generate`, a JSON line for each number of sequences.

`python docs/benchmarks/peer_transformers.py FOLDER P D N,N,... DTYPE THREADS`: prompts of P random tokens, D tokens
generated, of which all but the first count as decode. Needs torch and transformers.
"""

import json
import sys
import time

import torch
import transformers


def main() -> None:
    """Measure each number of sequences once, after a warm-up."""
    folder, prompt, decode, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[5]
    counts = [int(count) for count in sys.argv[4].split(",")]
    torch.set_num_threads(int(sys.argv[6]))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def seconds(sequences: int, tokens: int) -> float:
        ids = torch.randint(100, 40_000, (sequences, prompt))
        mask = torch.ones_like(ids)
        start = time.perf_counter()
        model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=2
        )
        return time.perf_counter() - start

    with torch.inference_mode():
        seconds(1, 2)
        for sequences in counts:
            prefill = seconds(sequences, 1)
            rest = seconds(sequences, decode) - prefill
            row = {
                "engine": "transformers",
                "version": transformers.__version__,
                "sequences": sequences,
                "prefill_tok_s": round(sequences * prompt / prefill, 1),
                "decode_tok_s": round(sequences * (decode - 1) / rest, 1),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
