"""`firstlight quality` for llama.cpp: its logits on the same tokens against firstlight's in float32.

    firstlight quality MODEL.gguf --dump DUMP
    PYTHONPATH=. LLAMA_PYTHON docs/benchmarks/quality_llamacpp.py DUMP MODEL.gguf [THREADS]

where LLAMA_PYTHON is the interpreter of an environment with llama-cpp-python and numpy. Prints the same lines.
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np

from server.quality import TOKENS, compare, lines


class Model:
    """One context of llama.cpp, emptied before each window."""

    def __init__(self, file: str, length: int, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = length
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.batch = llama_cpp.llama_batch_init(length, 0, 1)

    def logits(self, window: list[int]) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
        """[positions, vocabulary], of all tokens but the last."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        batch = self.batch
        for position, token in enumerate(window):
            batch.token[position], batch.pos[position], batch.n_seq_id[position] = token, position, 1
            batch.seq_id[position][0], batch.logits[position] = 0, True
        batch.n_tokens = len(window)
        if llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        rows = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(rows, shape=(len(window), self.vocabulary))[:-1].copy()


def main() -> None:
    """Compare window by window."""
    folder, threads = Path(sys.argv[1]), int(sys.argv[3]) if len(sys.argv) > 3 else 2
    windows = json.loads((folder / TOKENS).read_text())
    model = Model(sys.argv[2], max(map(len, windows)), threads)
    print("\n".join(lines(compare(folder, map(model.logits, windows)))))


if __name__ == "__main__":
    main()
