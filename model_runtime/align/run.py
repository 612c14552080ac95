"""Runs the product over prompts: one rank, or several in threads of this process, each with its share of the layers, as
the engine's ranks are in processes of their own. Called by `compare.py`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from model_runtime.align.product import Product
from model_runtime.align.prompts import Prompts, num_blocks, steps
from model_runtime.align.reference import Reference
from model_runtime.align.tracer import Recorder, Taken, traced_decoder

T = TypeVar("T")


@torch.inference_mode()
def logits_of(product: Product, prompts: Prompts, recorder: Recorder | None) -> Tensor:
    """[L, V] float32 of all prompts, through the paged cache; on other ranks than the first, of their tokens alone."""
    size = product.block_size
    kv = product.allocate(num_blocks(prompts, size), len(prompts))
    decoder = product.decoder if recorder is None else traced_decoder(product.decoder, recorder)
    count = sum(map(len, prompts))
    logits_LV: Tensor | None = None
    for step in steps(prompts, size):
        if recorder is not None:
            recorder.rows_T = step.rows_T
        hidden_TC = decoder.forward(product.batch(step.plan), kv)
        found_TV = decoder.logits(hidden_TC).float().cpu()
        if logits_LV is None:
            logits_LV = torch.empty(count, found_TV.shape[1])
        logits_LV[step.rows_T] = found_TV
    assert logits_LV is not None, "there are no prompts"
    return logits_LV


def on_ranks(ranks: Sequence[Product], function: Callable[[Product], T]) -> list[T]:
    """What each rank returns; all run at once, for they wait for each other."""
    if len(ranks) == 1:
        return [function(ranks[0])]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(function, ranks))


def served(ranks: Sequence[Product], prompts: Prompts) -> Tensor:
    """[L, V] of the product as it serves."""
    return on_ranks(ranks, lambda product: logits_of(product, prompts, None))[0]


def traced(ranks: Sequence[Product], reference: Reference, *, forced: bool) -> tuple[Tensor, dict[str, Taken]]:
    """The same operation by operation, with what is computed at each place; `forced` as in `Recorder`."""

    def one(product: Product) -> tuple[Tensor, dict[str, Taken]]:
        recorder = Recorder(reference, is_forced=forced)
        return logits_of(product, reference.prompts, recorder), recorder.taken

    logits_LV, taken = (results := on_ranks(ranks, one))[0]
    for _, others in results[1:]:
        for place, other in others.items():
            own = taken.setdefault(place, other)
            own.values = own.values.where(~own.values.isnan(), other.values)
    return logits_LV, taken
