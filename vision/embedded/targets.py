"""From scenes to what the heads should say at each patch: numpy arrays, one row a patch.

Called by the encoder's training and its measure of itself. Shapes: P patches of a picture, M pixels of a patch's mask.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vision.embedded.scene import NONE, Scene
from vision.embedded.vocabulary import HEADS, KINDS, MAX_COUNT, SCENES

MASK_SIDE = 8
"""The mask of a patch has this many cells a side."""
MIN_SHARE = 0.08
"""Of a patch, for a thing to be on it."""

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Of B pictures."""

    classes: dict[str, Int64]
    """For each head [B, P]; NONE where it is not asked."""
    weights: Float32
    """[B, P]: one over the patches of the thing that is there, so that small things count as much; 0 on background."""
    mask: Float32
    """[B, P, M]: whether something is there."""


def patch_owners(owner: UInt8, patch: int) -> Int64:
    """[P]: the thing that covers most of each patch, of those that cover enough; 0 for none."""
    side = owner.shape[0] // patch
    tiles = owner.reshape(side, patch, side, patch).transpose(0, 2, 1, 3).reshape(side * side, patch * patch)
    counts = np.stack([(tiles == number).sum(axis=1) for number in range(1, int(owner.max()) + 1)] or [tiles[:, 0] * 0])
    best = counts.argmax(axis=0)
    return np.where(counts.max(axis=0) >= MIN_SHARE * patch * patch, best + 1, 0).astype(np.int64)


def _mask(owner: UInt8, patch: int) -> Float32:
    side, cell = owner.shape[0] // patch, patch // MASK_SIDE
    cells = (owner > 0).reshape(side, MASK_SIDE, cell, side, MASK_SIDE, cell).mean(axis=(2, 5))
    rows: Float32 = cells.transpose(0, 2, 1, 3).reshape(side * side, MASK_SIDE**2).astype(np.float32)
    return rows


def _classes(scene: Scene, owners: Int64) -> dict[str, Int64]:
    """The background has a kind, a scene, a count and a place; things have what they have."""
    rows = {
        name: np.array([NONE, *(thing.of_head(name) for thing in scene.things)])
        for name in ("colour", "shape", "size", "icon", "glyph", "rank", "order")
    }
    rows["kind"] = np.array([0, *(KINDS.index(thing.kind) for thing in scene.things)])
    for name, value in (("scene", SCENES.index(scene.kind)), ("count", min(len(scene.things), MAX_COUNT) - 1)):
        rows[name] = np.full(len(scene.things) + 1, value)
    found = {name: values[owners] for name, values in rows.items()}
    found["row"], found["column"] = _thirds(len(owners))
    return found


def _thirds(patches: int) -> tuple[Int64, Int64]:
    """Of each patch 0, 1 or 2 from the top and from the left; the middle is a quarter of the grid."""
    side = math.isqrt(patches)
    place = (np.arange(side) * 2 + 1) / (2 * side)
    third = (place > 3 / 8).astype(np.int64) + (place > 5 / 8)
    return np.repeat(third, side), np.tile(third, side)


def targets(scenes: Sequence[Scene], patch: int) -> Targets:
    """Of a batch, for patches of `patch` pixels."""
    owners = [patch_owners(scene.owner, patch) for scene in scenes]
    classes = [_classes(scene, owner) for scene, owner in zip(scenes, owners, strict=True)]
    weights = []
    for owner in owners:
        sizes = np.bincount(owner)
        weights.append(np.where(owner > 0, 1 / sizes[owner], 0))
    return Targets(
        classes={name: np.stack([one[name] for one in classes]) for name in HEADS},
        weights=np.stack(weights).astype(np.float32),
        mask=np.stack([_mask(scene.owner, patch) for scene in scenes]),
    )
