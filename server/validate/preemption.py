"""Sequences that lose their keys and values and are computed again: a second server, with too few blocks for all."""

from server.validate.answers import Asker
from server.validate.gate import Gate
from server.validate.result import StageResult, skipped

LENGTH = 512
"""Tokens of the longest sequence that it takes, unless the model's own is less."""
OUTPUT_TOKENS = 64
NAME = "alone and preempted"


def run(gate: Gate) -> StageResult:
    """The stage. Raises Refused, httpx.HTTPError, ServerDidNotStart."""
    length = min(LENGTH, gate.facts().max_model_len)
    gate.close()  # its memory is wanted
    block = gate.block_size
    blocks = -(-length // block)
    gate.told(0.1, "starting a server with few blocks")
    small = ("--max-model-len", str(length), "--num-kv-blocks", str(blocks), "--data-parallel-size", "1")
    with gate.other_server(small) as server:
        asker = Asker(gate, server)
        tokens = min(OUTPUT_TOKENS, length // 4)
        gate.told(0.3, "one after the other")
        alone = asker.alone("alone", {"max_tokens": tokens})
        gate.told(0.6, "all at once")
        together = asker.together("together", {"max_tokens": tokens})
        preemptions = int(server.metric("num_preemptions_total"))
    if not preemptions:
        return StageResult(checks=(skipped(NAME, f"{len(alone)} sequences had room in {blocks} blocks"),))
    fact = f"{preemptions} preemptions among {len(alone)} sequences in {blocks} blocks of {block} tokens."
    return StageResult(checks=(asker.same(NAME, alone, together),), facts=(fact,))
