"""The reference of a checkpoint: what transformers computes for prompts that fit it, with a picture if it takes any.
Called by `server/align/command.py`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from model_runtime.align.pictures import make_picture
from model_runtime.align.prompts import cut_prompts, lengths_for, seeded_prompts
from model_runtime.align.reference import DTYPES, DtypeName, Reference
from model_runtime.align.transformers_model import load_filled, load_transformers
from model_runtime.align.transformers_reference import run_transformers
from model_runtime.config import RuntimeConfig
from model_runtime.memory.budget import model_length
from model_runtime.opening import Opened
from model_runtime.weights.errors import CheckpointError


def reference_of(opened: Opened, dtype: DtypeName, runtime: RuntimeConfig, text: Sequence[int]) -> Reference:
    """Of a checkpoint, for prompts that fit it, from the beginning of `text` as far as there is any. What the product
    holds as integers is compared with the floats that these mean, and beside it are the logits of the checkpoint's own
    floats, if it has them. Raises CheckpointError, PlanError."""
    path, config, quantization = opened.path, opened.config, runtime.quantization
    lengths = lengths_for((*config.sliding_windows, *config.attention_chunks), model_length(config, runtime))
    picture = None if opened.side is None else make_picture(opened.side, opened.side.tower.family)
    tower = None if opened.side is None else opened.side.tower
    # of models with images the last tokens have meanings of their own
    vocab_size = config.vocab_size if picture is None else picture.token_id
    is_enough = len(text) >= sum(lengths) and max(text) < vocab_size
    prompts = cut_prompts(text, lengths) if is_enough else seeded_prompts(lengths, vocab_size)
    if picture is not None:
        prompts = picture.within(prompts[0]), *prompts[1:]
    stored = any(tensor.format is not None for tensor in opened.source.values())
    is_apart = opened.image_folder is not None
    if quantization == "none" and not stored and not is_apart:
        return run_transformers(load_transformers(path, DTYPES[dtype]), config, prompts, DTYPES[dtype], tower, picture)
    if dtype != "float32":
        raise CheckpointError("weights of integers, or from two places, are compared in float32: leave --dtype out")
    full_LV = None
    if quantization != "none" and not stored:
        full = load_filled(opened, "none") if is_apart else load_transformers(path, torch.float32)
        full_LV = run_transformers(full, config, prompts, torch.float32, tower, picture).logits_LV
    filled = run_transformers(load_filled(opened, quantization), config, prompts, torch.float32, tower, picture)
    how = "the integers of the file expanded" if stored else f"{quantization} expanded"
    made_by = f"{filled.made_by} with {'weights from two places' if not stored and quantization == 'none' else how}"
    return replace(filled, made_by=made_by, full_LV=full_LV, quantization=quantization)
