"""What every implementation returns, in one shape, so that any two can be compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]


@dataclass
class Result:
    """Outputs for T tokens and the state after the last of them; dictionaries are keyed by layer.

    Attributes:
        logits: [T, vocab], before any sampling.
        hidden: [T, hidden], after the final norm: what the head and the MTP head read.
        recurrent: [value heads, key dim, value dim] of each gated-delta-net layer.
        conv: [channels, kernel - 1], the convolution's last inputs before its activation, oldest first.
        keys, values: [T, kv heads, head dim] of each attention layer; keys are normalised and rotated.
        experts: [T, top_k] chosen experts of each layer, the most probable first (filled by the reference).
    """

    logits: FloatArray
    hidden: FloatArray
    recurrent: dict[int, FloatArray] = field(default_factory=dict)
    conv: dict[int, FloatArray] = field(default_factory=dict)
    keys: dict[int, FloatArray] = field(default_factory=dict)
    values: dict[int, FloatArray] = field(default_factory=dict)
    experts: dict[int, NDArray[np.int64]] = field(default_factory=dict)

    def differences(self, other: Result) -> dict[str, float]:
        """Largest absolute difference of each kind of output: {"logits": 2e-5, "recurrent": 1e-6, ...}."""
        worst = {name: _largest(getattr(self, name), getattr(other, name)) for name in ("logits", "hidden")}
        for name in ("recurrent", "conv", "keys", "values"):
            mine, theirs = getattr(self, name), getattr(other, name)
            assert mine.keys() == theirs.keys(), f"{name}: layers {sorted(mine)} against {sorted(theirs)}"
            worst[name] = max((_largest(mine[layer], theirs[layer]) for layer in mine), default=0.0)
        return worst


def _largest(a: FloatArray, b: FloatArray) -> float:
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape}"
    difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0))
