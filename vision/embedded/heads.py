"""The heads over the tower and their losses. One linear layer for all: its rows become the projector's first layer.

Used by the training of the encoder. Shapes: B pictures, P patches, W width, R rows of all heads, M cells of a mask.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision.embedded.targets import MASK_SIDE, Targets
from vision.embedded.vocabulary import HEADS

EVERYWHERE = ("kind", "scene", "count", "column", "row")
"""Heads that are asked on the background too."""
LOSS_WEIGHTS: Mapping[str, float] = {
    "kind": 1.0,
    "scene": 0.3,
    "count": 1.0,
    "column": 0.1,
    "row": 0.1,
    "colour": 1.0,
    "shape": 1.5,
    "size": 0.3,
    "icon": 2.0,
    "glyph": 2.0,
    "rank": 0.5,
    "order": 0.7,
}
MASK_WEIGHT = 2.0
PRESENT_WEIGHT = 0.1
ABSENT = -4.0
"""Every class's logit at first: nothing is there."""


class Heads(nn.Module):
    """Logits for every patch. The mask is not asked of the model later; it teaches outlines.

    The logits are trained twice: to choose among the classes of a head, and each to be above zero only where its class
    is, which makes the row a detector that the projector can take as it is.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.classes = nn.Linear(width, sum(HEADS.values()))
        self.mask = nn.Linear(width, MASK_SIDE**2)
        for layer, bias in ((self.classes, ABSENT), (self.mask, 0.0)):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.constant_(layer.bias, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, P, W] to [B, P, R] and [B, P, M], both float32."""
        return self.classes(x).float(), self.mask(x).float()


def split_heads(logits: Tensor) -> dict[str, Tensor]:
    """[..., R] by name of the head."""
    return dict(zip(HEADS, torch.split(logits, list(HEADS.values()), dim=-1), strict=True))


def losses(logits: Tensor, mask: Tensor, targets: Targets) -> dict[str, Tensor]:
    """A number a head, "mask" and "present"; not yet weighted."""
    device = logits.device
    weights = torch.from_numpy(targets.weights).to(device).flatten()
    found, present = {}, []
    for name, rows in split_heads(logits).items():
        wanted = torch.from_numpy(targets.classes[name]).to(device).flatten()
        asked = wanted >= 0
        present.append(F.one_hot(wanted.clamp_min(0), rows.shape[-1]) * asked[:, None])
        rows, wanted = rows.flatten(0, 1)[asked], wanted[asked]
        each = F.cross_entropy(rows, wanted, reduction="none")
        share = torch.ones_like(each) if name in EVERYWHERE else weights[asked]
        found[name] = (each * share).sum() / share.sum().clamp_min(1.0)
    each = F.binary_cross_entropy_with_logits(logits.flatten(0, 1), torch.cat(present, dim=1).float(), reduction="none")
    found["present"] = each.sum(dim=1).mean()
    found["mask"] = F.binary_cross_entropy_with_logits(mask, torch.from_numpy(targets.mask).to(device))
    return found


def total(parts: Mapping[str, Tensor]) -> Tensor:
    """The weighted sum."""
    sums = [parts[name] * weight for name, weight in LOSS_WEIGHTS.items()]
    return torch.stack(sums).sum() + MASK_WEIGHT * parts["mask"] + PRESENT_WEIGHT * parts["present"]
