"""What every implementation returns, in one shape, so that any two can be compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]

# How far a correct float32 implementation of a tiny model may be from float64, for up to 300 tokens. One
# float32 rounding is 6e-8 of a value; sums over widths of 100 to 1000 and four to eight layers add up some
# 100 of them, on values of up to about 4 (logits 10). Measured over every shape, three seeds and 300 tokens:
# logits 3e-5 for NumPy and 5e-5 for mlx-lm, recurrent state 8e-6, convolution 1e-5.
TOLERANCES = {"logits": 1e-4, "hidden": 1e-4, "recurrent": 3e-5, "conv": 3e-5, "keys": 1e-4, "values": 1e-4}


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

    def assert_close(self, other: Result, scale: float = 1.0) -> None:
        """Fails unless every kind of output is within `scale` times its tolerance."""
        worst = self.differences(other)
        beyond = {name: value for name, value in worst.items() if not value <= scale * TOLERANCES[name]}
        assert not beyond, f"differences beyond {scale} x {TOLERANCES}: {beyond}"


def _largest(a: FloatArray, b: FloatArray) -> float:
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape}"
    difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return float(np.nan_to_num(difference, nan=np.inf).max(initial=0.0))
