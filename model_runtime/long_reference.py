"""The decoder of a checkpoint in plain torch and float64, to hold rows of a long text against. Process of `firstlight
validate`."""

from pathlib import Path

import torch

from model_runtime.checkpoint import load_model
from model_runtime.config import Quantization
from model_runtime.models.decoder import Decoder
from model_runtime.ops import load_ops
from model_runtime.weights.load import Precision


def reference_decoder(path: Path, quantization: Quantization, positions: int) -> Decoder:
    """Without rounding of rows. Raises CheckpointError."""
    device = torch.device("cpu")
    ops = load_ops(device, "reference")
    exact = Precision(quantization=quantization, row_bits=0)
    model = load_model(path, ops, device, lambda fraction: None, positions, exact)
    return Decoder(model.config, model.decoder.parameters, ops, device, positions, torch.float64)
