"""Rates of transformers' `generate`, a JSON line for each number of sequences.

`python docs/benchmarks/peer_transformers.py FOLDER P D N,N,... DTYPE THREADS`: prompts of P random tokens, D tokens
generated, of which all but the first count as decode. Needs torch and transformers.
"""

import time

import torch
import transformers
from peer_rates import asked_for


def main() -> None:
    """Measure each number of sequences once, after a warm-up."""
    load = asked_for()
    facts = {"engine": "transformers", "version": transformers.__version__}
    torch.set_num_threads(load.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(load.model, dtype=getattr(torch, load.dtype)).eval()

    def seconds(sequences: int, tokens: int) -> float:
        ids = torch.randint(100, 40_000, (sequences, load.prompt))
        mask = torch.ones_like(ids)
        start = time.perf_counter()
        model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=2
        )
        return time.perf_counter() - start

    with torch.inference_mode():
        seconds(1, 2)
        for sequences in load.counts:
            prefill = seconds(sequences, 1)
            load.answer(facts, sequences, prefill, load.decode - 1, seconds(sequences, load.decode) - prefill)


if __name__ == "__main__":
    main()
