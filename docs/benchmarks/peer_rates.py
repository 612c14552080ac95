"""What a peer's script is asked and what it answers. Standard library only, since each runs in its peer's environment:
`python docs/benchmarks/peer_NAME.py MODEL P D N,N,... [DTYPE] THREADS`.
"""

import json
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Numbers of sequences, and tokens of each."""

    model: str
    prompt: int
    decode: int
    counts: tuple[int, ...]
    dtype: str
    """Empty where the model's file says it."""
    threads: int

    def answer(
        self, facts: dict[str, str], sequences: int, prefill_seconds: float, decode_steps: int, decode_seconds: float
    ) -> None:
        """Print the JSON line of a number of sequences: all prompts together, then steps of a token for each."""
        rates = {
            "prefill_tok_s": round(sequences * self.prompt / prefill_seconds, 1),
            "decode_tok_s": round(sequences * decode_steps / decode_seconds, 1),
        }
        print(json.dumps(facts | {"sequences": sequences} | rates), flush=True)


def asked_for() -> Load:
    """By the command line."""
    model, prompt, decode, counts, *dtype, threads = sys.argv[1:]
    return Load(
        model=model,
        prompt=int(prompt),
        decode=int(decode),
        counts=tuple(map(int, counts.split(","))),
        dtype="".join(dtype),
        threads=int(threads),
    )
