"""How far one model's predictions are from another's, position by position. Used by `quality_command.py`, and by
docs/benchmarks/quality_llamacpp.py in an environment that has numpy only; any process.

Legend: P positions, V vocabulary.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LOGITS, TOKENS = "logits.npy", "tokens.json"
"""What a folder holds of a reference: float32 [positions, vocabulary], and the windows of token ids."""
ROWS = 64
"""Positions whose distributions exist in float64 at the same time: 64 rows of 49 152 are 24 MiB each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of all positions. p are the probabilities of the reference, q those of the other; natural logarithms."""

    positions: int
    mean_kl: float
    """Mean of KL(p || q) = sum over the vocabulary of p * (log p - log q)."""
    median_kl: float
    p99_kl: float
    max_kl: float
    agreement: float
    """Share of positions where both have the same most likely token."""
    reference_perplexity: float
    """exp of the mean of -log p(next token of the text)."""
    perplexity: float
    """The same of q."""
    max_logit_difference: float


class Comparison:
    """Collects positions, then says what they amount to."""

    def __init__(self) -> None:
        self._kl: list[NDArray[np.float64]] = []
        self._same: list[NDArray[np.bool_]] = []
        self._losses: list[NDArray[np.float64]] = []
        self._difference = 0.0

    def add(self, reference_PV: NDArray[np.float32], other_PV: NDArray[np.float32], next_P: NDArray[np.int32]) -> None:
        """Positions with the logits that both gave, and the token of the text that follows each."""
        for start in range(0, len(next_P), ROWS):
            rows = slice(start, start + ROWS)
            self._add(reference_PV[rows], other_PV[rows], next_P[rows])

    def _add(self, reference_PV: NDArray[np.float32], other_PV: NDArray[np.float32], next_P: NDArray[np.int32]) -> None:
        log_p, log_q = _log_softmax(reference_PV), _log_softmax(other_PV)
        where = np.arange(len(next_P))
        self._kl.append((np.exp(log_p) * (log_p - log_q)).sum(axis=1))
        self._same.append(reference_PV.argmax(axis=1) == other_PV.argmax(axis=1))
        self._losses.append(np.stack([-log_p[where, next_P], -log_q[where, next_P]]))
        self._difference = max(self._difference, float(np.abs(reference_PV - other_PV).max()))

    def result(self) -> Quality:
        """Of everything that was added; at least one position."""
        kl = np.maximum(np.concatenate(self._kl), 0.0)  # rounding may leave -1e-17
        losses = np.concatenate(self._losses, axis=1).mean(axis=1)
        return Quality(
            positions=len(kl),
            mean_kl=float(kl.mean()),
            median_kl=float(np.median(kl)),
            p99_kl=float(np.percentile(kl, 99)),
            max_kl=float(kl.max()),
            agreement=float(np.concatenate(self._same).mean()),
            reference_perplexity=float(np.exp(losses[0])),
            perplexity=float(np.exp(losses[1])),
            max_logit_difference=self._difference,
        )


def _log_softmax(logits_PV: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits_PV.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def compare(folder: Path, others: Iterator[NDArray[np.float32]]) -> Quality:
    """The reference's logits in `folder` with another's, window by window. At least one window."""
    reference = np.load(folder / LOGITS, mmap_mode="r")
    comparison, start = Comparison(), 0
    for window, other in zip(json.loads((folder / TOKENS).read_text()), others, strict=True):
        rows = slice(start, start + len(window) - 1)
        comparison.add(reference[rows], other, np.asarray(window[1:], dtype=np.int32))
        start = rows.stop
    return comparison.result()


def lines(quality: Quality) -> list[str]:
    """For people."""
    return [
        f"KL divergence     mean {quality.mean_kl:.3g}, median {quality.median_kl:.3g}, "
        f"99th percentile {quality.p99_kl:.3g}, largest {quality.max_kl:.3g} nats",
        f"top-1 agreement   {quality.agreement:.2%} of {quality.positions} positions",
        f"perplexity        {quality.perplexity:.4f}, of the reference {quality.reference_perplexity:.4f}",
        f"logits            differ by {quality.max_logit_difference:.3g} at most",
    ]
