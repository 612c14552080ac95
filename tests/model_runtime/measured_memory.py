"""What models take of a process's memory, as Linux counts it: `python -m tests.model_runtime.measured_memory JSON`.

Run by `test_plan_measured.py` in a process of its own, where little else moves, and where the C library gives back what
is freed (MALLOC_MMAP_THRESHOLD_). For each model it forks, loads, writes every KV block, computes the largest step, and
prints what each of these took beside what was planned.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch

from model_runtime.config import RuntimeConfig
from model_runtime.device import give_back_memory
from model_runtime.executor import load_runner
from model_runtime.memory.meter import MemoryMeter
from model_runtime.memory.steps import SCORE_CHUNK
from model_runtime.opening import open_checkpoint
from model_runtime.ops import load_ops
from scheduler.config import SchedulerConfig
from scheduler.plan import ImageJobs, ImagePixels, SampleRows, ScoreRows, StepPlan, ints
from tests.model_runtime.memory import measured_bytes
from tests.model_runtime.sampling_case import Row, to_plan

CPU = torch.device("cpu")


def step(tokens: int, sequences: int, block_size: int, image: ImagePixels | None) -> StepPlan:
    """Of sequences that are equally long and sampled from, and whose first tokens are scored; before it, an image is
    encoded."""
    length, blocks = tokens // sequences, -(-(tokens // sequences) // block_size)
    sampled = to_plan([Row(temperature=1.0, top_p=0.9, seed=index) for index in range(sequences)])
    ends = ints([length * (index + 1) - 1 for index in range(sequences)])
    return StepPlan(
        step_id=1,
        token_ids=ints([index % 250 + 3 for index in range(tokens)]),
        query_lens=ints([length] * sequences),
        kv_lens=ints([length] * sequences),
        block_tables=ints(list(range(blocks * sequences))),
        sample=SampleRows(**{name: getattr(sampled, name) for name in SampleRows.__slots__} | {"rows": ends}),
        score=ScoreRows(
            rows=ints(list(range(SCORE_CHUNK))), targets=ints([5] * SCORE_CHUNK), top_logprobs=ints([3] * SCORE_CHUNK)
        ),
        encode=ImageJobs() if image is None else ImageJobs(slots=ints([0]), num_embeddings=ints([1]), pixels=(image,)),
    )


def measure(path: Path, tokens: int, sequences: int, side: int) -> dict[str, int]:
    """Bytes, planned and taken. With `side` an image of such a square is encoded."""
    load_ops(CPU, "auto")
    open_checkpoint(path)  # Python keeps some of what parsing it took
    scheduler = SchedulerConfig(max_num_seqs=sequences, max_num_batched_tokens=tokens, max_encode_pixels=1)
    runtime = RuntimeConfig(max_model_len=1024, num_kv_blocks=512, threads=1, prepare_weights=False)
    meter = MemoryMeter(CPU)
    gc.collect()
    give_back_memory(CPU)
    before = meter.used()
    runner, info = load_runner(path, runtime, scheduler, lambda stage, fraction: None)
    loaded = meter.used()
    for cache_of_layer in runner._kv:  # type: ignore[attr-defined]
        for pool in cache_of_layer.pools:
            pool.fill_(1)
    filled = meter.used()
    image = None
    if side:
        data = bytes(side * side * 3)
        shape = {"tiles": 1, "height": side, "width": side, "rows": 0, "cols": 0}
        image = ImagePixels(data=data, image_height=side, image_width=side, **shape)
    plan = step(tokens, sequences, info.block_size, image)
    runner.run(plan)  # what threads and libraries keep for themselves is not the step's
    meter.begin()
    runner.run(plan)
    taken, _ = meter.end()
    return {
        "weights": info.weight_bytes,
        "weights taken": loaded - before,
        "kv": info.kv_bytes,
        "kv taken": filled - loaded,
        "step": info.step_bytes,
        "step taken": taken,
        "tensors of the step": measured_bytes(lambda: runner.run(plan))[0],
    }


def main() -> None:
    """Prints a line of JSON for each model."""
    for model in json.loads(sys.argv[1]):
        if not (pid := os.fork()):
            print(json.dumps(measure(Path(model.pop("path")), **model)), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
