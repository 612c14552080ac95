"""Computes one long text and holds rows of it against each other: `python -m server.validate.context_process`.

A process of its own, so that what it takes is what the model takes. Reads two lines of JSON (`context_found.py`) and
writes one for each step.
"""

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from model_runtime.align.product import Product, load_product
from model_runtime.device import default_budget
from model_runtime.huge_pages import HUGE_PAGE
from model_runtime.long_reference import reference_decoder
from model_runtime.long_text import (
    Logits,
    LongText,
    Worst,
    checked_positions,
    compared_again,
    compared_alone,
)
from model_runtime.memory.budget import PlanError, model_length
from model_runtime.memory.caches import cache_block_bytes
from model_runtime.memory.meter import MemoryMeter
from model_runtime.memory.steps import FLOAT_BYTES, step_bytes
from model_runtime.ops import is_compiled
from model_runtime.weights.errors import CheckpointError
from server.config import ServeConfig, from_json
from server.validate.context_found import CannotDo, ContextFound, ContextWanted, Difference, Done, Line, Moment, Told

SAMPLES = 200
"""Of memory, at most."""
REFERENCE_HEADROOM = 1.5
"""Bytes of memory that must be free for each of the reference's weights in their storage type."""


REFERENCE_TOKENS = 300
"""That plain torch computes of a model with states, where it must begin at the beginning."""


def _say(line: Line) -> None:
    print(msgspec.json.encode(line).decode(), flush=True)


def main() -> None:
    """The child."""
    config = from_json(sys.stdin.readline().encode())
    wanted = msgspec.json.decode(sys.stdin.readline(), type=ContextWanted)
    try:
        _say(Done(found=compute(config, wanted, lambda fraction, what: _say(Told(fraction=fraction, what=what)))))
    except (PlanError, CheckpointError) as error:
        _say(CannotDo(why=str(error)))


def compute(config: ServeConfig, wanted: ContextWanted, told: Callable[[float, str], None]) -> ContextFound:
    """Raises CheckpointError, PlanError."""
    told(0.0, "loading the model")
    product = load_product(Path(wanted.model), config.runtime, lambda fraction: None)
    own, block_size = product.decoder.own, product.block_size
    block_bytes = cache_block_bytes(own, block_size, product.kv_type)
    alone_there = replace(config.scheduler, max_num_seqs=1, speculative_config=None)
    activations = step_bytes(own, config.runtime, alone_there)
    budget = config.runtime.memory_budget or default_budget(product.device)
    # twice the blocks: a part is computed again in other ones
    room = (budget - product.model.weight_bytes - activations) // (2 * block_bytes) * block_size
    tokens = min(wanted.tokens, room, model_length(product.model.config, config.runtime))
    chunk = config.scheduler.max_num_batched_tokens
    if tokens < 2 * chunk:
        raise PlanError(f"there is room for {tokens} tokens, and a text of two steps of {chunk} is the shortest")
    ids = list(itertools.islice(itertools.cycle(wanted.token_ids), tokens))
    text = LongText(product, ids)
    positions = checked_positions(tokens, chunk, block_size, own.sliding_windows)
    base = MemoryMeter(product.device).used()
    logits, moments = _prefill(text, product, positions, wanted, chunk, told)
    told(0.6, "rows by themselves")
    alone = None if text.has_states else _difference(compared_alone(text, logits), len(logits))
    told(0.65, "the beginning in other chunks")
    end = min(moments[-1].tokens, wanted.other_chunks)
    other = compared_again(product, ids, text, logits, end)
    told(0.75, "rows in plain torch and float64")
    reference, why = _reference(config, wanted, product, ids, text, logits)
    return ContextFound(
        tokens=moments[-1].tokens,
        chunk=chunk,
        room=room,
        is_exact=is_compiled(product.decoder.ops),
        is_rounded=product.decoder.parameters.row_bits > 0 or product.kv_type.itemsize < FLOAT_BYTES,
        base_bytes=base,
        block_bytes=block_bytes,
        block_size=block_size,
        num_pools=text.num_pools,
        page_bytes=HUGE_PAGE,
        text_blocks=-(-tokens // block_size),
        step_bytes=activations,
        moments=tuple(moments[:: -(-len(moments) // SAMPLES)]),
        alone=alone,
        other_chunks=_difference(other, sum(position < end for position in logits)),
        reference=reference,
        why_no_reference=why,
    )


def _prefill(
    text: LongText,
    product: Product,
    positions: list[int],
    wanted: ContextWanted,
    chunk: int,
    told: Callable[[float, str], None],
) -> tuple[Logits, list[Moment]]:
    moments: list[Moment] = []
    meter = MemoryMeter(product.device)
    start = time.monotonic()

    def on_chunk(tokens: int) -> bool:
        seconds = time.monotonic() - start
        moments.append(Moment(tokens=tokens, seconds=seconds, num_bytes=meter.used()))
        told(0.6 * max(tokens / wanted.tokens, seconds / wanted.seconds), f"{tokens} tokens")
        return seconds < wanted.seconds

    return text.compute(chunk, positions, on_chunk), moments


def _reference(
    config: ServeConfig, wanted: ContextWanted, product: Product, ids: list[int], text: LongText, logits: Logits
) -> tuple[Difference | None, str]:
    """Of some rows, as far apart as they may be, or of the beginning where there are states; or why not."""
    if product.device.type != "cpu":
        return None, "plain torch is compared on the CPU only"
    if default_budget(product.device) < REFERENCE_HEADROOM * product.model.weight_bytes:
        return None, "there is no memory for the model in plain torch beside it"
    places = sorted(logits)
    decoder = reference_decoder(Path(wanted.model), config.runtime.quantization, product.positions)
    if text.has_states:
        end = min(len(ids), REFERENCE_TOKENS)
        rows = sum(place < end for place in places)
        return _difference(compared_again(product, ids, text, logits, end, decoder), rows), ""
    count = min(wanted.reference_rows, len(places))
    chosen = {places[round(index * (len(places) - 1) / max(1, count - 1))] for index in range(count)}
    found = {position: logits[position] for position in sorted(chosen)}
    return _difference(compared_alone(text, found, decoder), len(found)), ""


def _difference(worst: Worst, rows: int) -> Difference:
    return Difference(logits=worst.logits, cache=worst.cache, position=worst.position, rows=rows)


if __name__ == "__main__":
    main()
