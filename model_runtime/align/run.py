"""Runs the product over prompts: one rank, or several in threads of this process, each with its share of the layers, as
the engine's ranks are in processes of their own. Called by `compare.py`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from model_runtime.align.pictures import Picture
from model_runtime.align.product import Product
from model_runtime.align.prompts import Prompts, num_blocks, steps
from model_runtime.align.reference import Reference
from model_runtime.align.tower_tracer import encoded
from model_runtime.align.tracer import Recorder, Taken, traced_decoder
from model_runtime.batch import ImageRows
from model_runtime.weights.errors import CheckpointError
from scheduler.plan import ints

T = TypeVar("T")


@torch.inference_mode()
def logits_of(product: Product, prompts: Prompts, recorder: Recorder | None, picture: Picture | None = None) -> Tensor:
    """[L, V] float32 of all prompts, the first with a picture if there is one, through the paged cache; on other ranks
    than the first, of their tokens alone."""
    size = product.block_size
    kv = product.allocate(num_blocks(prompts, size), len(prompts))
    decoder = product.decoder if recorder is None else traced_decoder(product.decoder, recorder)
    images = () if picture is None else (_image_rows(product, picture, recorder),)
    parts: dict[Tensor, Tensor] = {}
    for step in steps(prompts, size, whole=0 if picture is None else picture.end):
        if recorder is not None:
            recorder.rows_T = step.rows_T
        plan = step.plan
        if picture is not None and product.decoder.config.rope.mrope_sections:
            plan = replace(plan, rope_positions=ints(_rope_positions(prompts, picture, step.rows_T)))
        if picture is not None and not parts:
            plan = picture.planned(plan, 0)
        hidden_TC = decoder.forward(product.batch(plan, () if parts else images), kv)
        parts[step.rows_T] = decoder.logits(hidden_TC).float().cpu()
    return torch.cat(list(parts.values()))[torch.cat(list(parts)).argsort()]


def _image_rows(product: Product, picture: Picture, recorder: Recorder | None) -> ImageRows:
    vision = product.model.vision
    if vision is None:
        raise CheckpointError("the reference has a picture, and the model takes none")
    image = replace(picture.image, pixels=picture.image.pixels.to(product.device))
    return picture.rows(encoded(vision.encoder, image, recorder), 0)


def _rope_positions(prompts: Prompts, picture: Picture, rows_T: Tensor) -> list[int]:
    """Three for each row of a step."""
    positions = picture.positions(len(prompts[0]))
    for prompt in prompts[1:]:
        positions += [(place,) * 3 for place in range(len(prompt))]
    return [number for row in rows_T.tolist() for number in positions[row]]


def on_ranks(ranks: Sequence[Product], function: Callable[[Product], T]) -> list[T]:
    """What each rank returns; all run at once, for they wait for each other."""
    if len(ranks) == 1:
        return [function(ranks[0])]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(function, ranks))


def served(ranks: Sequence[Product], reference: Reference) -> Tensor:
    """[L, V] of the product as it serves."""
    prompts, picture = reference.prompts, reference.picture
    return on_ranks(ranks, lambda product: logits_of(product, prompts, None, picture))[0]


def traced(ranks: Sequence[Product], reference: Reference, *, forced: bool) -> tuple[Tensor, dict[str, Taken]]:
    """The same operation by operation, with what is computed at each place; `forced` as in `Recorder`."""

    def one(product: Product) -> tuple[Tensor, dict[str, Taken]]:
        recorder = Recorder(reference, is_forced=forced)
        return logits_of(product, reference.prompts, recorder, reference.picture), recorder.taken

    logits_LV, taken = (results := on_ranks(ranks, one))[0]
    for _, others in results[1:]:
        for place, other in others.items():
            own = taken.setdefault(place, other)
            own.values = own.values.where(~own.values.isnan(), other.values)
    return logits_LV, taken
