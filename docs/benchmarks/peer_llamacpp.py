"""Rates of llama.cpp through llama-cpp-python's plain bindings, a JSON line for each number of sequences.

`python docs/benchmarks/peer_llamacpp.py MODEL.gguf P D N,N,... THREADS`: N prompts of P random tokens in batches of
2048 (512 at a time), then D steps of all N sequences together. Needs `pip install llama-cpp-python`, which compiles
llama.cpp for this processor; `llama_print_system_info` in each line says for what.
"""

import time

import llama_cpp
import numpy as np
from peer_rates import asked_for

BATCH, MICRO_BATCH = 2048, 512


class Engine:
    """A context for some sequences, and the batch that is being filled for it."""

    def __init__(self, model: object, sequences: int, length: int, threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = sequences * length, BATCH, MICRO_BATCH
        params.n_seq_max, params.n_threads, params.n_threads_batch = sequences, threads, threads
        params.kv_unified = False
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.batch.n_tokens = 0

    def put(self, token: int, position: int, sequence: int, wants_logits: bool) -> None:
        """Append a token to the batch; a full one is computed."""
        batch, row = self.batch, self.batch.n_tokens
        batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, position, 1, wants_logits
        batch.seq_id[row][0] = sequence
        batch.n_tokens = row + 1
        if batch.n_tokens == BATCH:
            self.flush()

    def flush(self) -> None:
        """Compute what is in the batch."""
        if self.batch.n_tokens and llama_cpp.llama_decode(self.context, self.batch):
            raise RuntimeError("llama_decode failed")
        self.batch.n_tokens = 0

    def prefill(self, prompts: "np.ndarray[tuple[int, int], np.dtype[np.int64]]") -> float:
        """Seconds for int [sequences, P] prompts, with the logits of each one's last token."""
        start = time.perf_counter()
        for sequence, prompt in enumerate(prompts.tolist()):
            for position, token in enumerate(prompt):
                self.put(token, position, sequence, position == len(prompt) - 1)
        self.flush()
        llama_cpp.llama_synchronize(self.context)
        return time.perf_counter() - start

    def forget(self) -> None:
        """Empty the context."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def close(self) -> None:
        """Give the memory back."""
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)


def seconds(model: object, sequences: int, prompt: int, decode: int, threads: int) -> tuple[float, float]:
    """Of the prefill and of all decode steps, measured once, after a warm-up of one prompt."""
    engine, draw = Engine(model, sequences, prompt + decode + 8, threads), np.random.default_rng(0)
    engine.prefill(draw.integers(100, 40_000, (1, prompt)))
    engine.forget()
    prefill = engine.prefill(draw.integers(100, 40_000, (sequences, prompt)))
    tokens = draw.integers(100, 40_000, (decode, sequences)).tolist()
    start = time.perf_counter()
    for step in range(decode):
        for sequence in range(sequences):
            engine.put(tokens[step][sequence], prompt + step, sequence, True)
        engine.flush()
    llama_cpp.llama_synchronize(engine.context)
    steps = time.perf_counter() - start
    engine.close()
    return prefill, steps


def main() -> None:
    """Measure each number of sequences."""
    load = asked_for()
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(load.model.encode(), llama_cpp.llama_model_default_params())
    features = llama_cpp.llama_print_system_info().decode().strip(" |\n")
    facts = {"engine": "llama.cpp", "version": llama_cpp.__version__, "features": features}
    for sequences in load.counts:
        prefill, steps = seconds(model, sequences, load.prompt, load.decode, load.threads)
        load.answer(facts, sequences, prefill, load.decode, steps)


if __name__ == "__main__":
    main()
