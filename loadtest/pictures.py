"""Images to send, made from a seed. Used by `loadtest/workload.py`."""

import base64
import io
import random
from typing import Literal

import numpy as np
from PIL import Image

COARSE = 24
"""Random colours along each side, before they are blended: files as large as those of photographs."""
NOISE = 6
"""Grain in steps of colour, which keeps PNG files from being unusually small."""


def data_url(rng: random.Random, size: tuple[int, int], image_format: Literal["png", "jpeg"]) -> str:
    """A picture of width and height as a data URL; no two draws are equal."""
    noise = np.random.default_rng(rng.getrandbits(64))
    coarse = Image.fromarray(noise.integers(0, 256, (COARSE, COARSE, 3), dtype=np.uint8))
    smooth_HWC = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
    grained_HWC = smooth_HWC + noise.integers(-NOISE, NOISE + 1, smooth_HWC.shape, dtype=np.int16)
    file = io.BytesIO()
    picture = Image.fromarray(grained_HWC.clip(0, 255).astype(np.uint8))
    picture.save(file, image_format.upper())
    return f"data:image/{image_format};base64,{base64.b64encode(file.getvalue()).decode()}"
