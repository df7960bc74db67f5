"""Samplers, and what their draws should be distributed like, by NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lily_py import _core

Logits = NDArray[np.float32]


def sampler(**options: Any) -> _core.Sampler:
    """A sampler with everything off but what is given."""
    values: dict[str, Any] = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": [], "seed": 0, "vocabulary": 1 << 20,
    }  # fmt: skip
    return _core.Sampler(**(values | options))


def softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())


def expected_distribution(
    logits: Logits, temperature: float, top_k: int, top_p: float, min_p: float
) -> dict[int, float]:
    """Temperature, then the k best, then the fewest whose share reaches top_p, then those above min_p."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    order = order[: top_k or len(order)]
    share = softmax(scaled[order])
    if top_p < 1:
        reached = np.cumsum(share)
        keep = np.concatenate([[True], reached[:-1] < top_p])
        order, share = order[keep], share[keep]
    keep = share >= min_p * share[0]
    order, share = order[keep], share[keep]
    return dict(zip(order.tolist(), (share / share.sum()).tolist(), strict=True))


def chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """The statistic in standard deviations from its mean; draws are right if it is a few at most."""
    expected = counts.sum() * probabilities
    statistic = float(np.sum((counts - expected) ** 2 / expected))
    freedom = len(counts) - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)
