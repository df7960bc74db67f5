"""What the kernel tests share: bf16 and quantised arrays, and formulas in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[2]
METAL = ROOT / "metal"
sys.path.insert(0, str(ROOT / "tools"))

from metalsim.simulator import SEEDS, Buffer, Encoder, Library, Simulator  # noqa: E402

__all__ = ["Buffer", "Encoder", "Library", "Simulator"]  # for tests: this module makes metalsim importable

Array = npt.NDArray[Any]
BF16 = ml_dtypes.bfloat16
EPS = 1e-6

# Type of the activations by the name of the build, and the relative rounding of storing one.
ACTIVATIONS = {"bfloat": (BF16, 2.0**-8), "float": (np.float32, 2.0**-22)}


def bf16(values: Array) -> Array:
    """Rounded to bf16, as the type of 16 bits."""
    return np.asarray(values, np.float32).astype(BF16)


@dataclass(frozen=True)
class Weights:
    """A matrix as kernels take it, and in float64; `bits` 16 is bf16 without scales."""

    bits: int
    group: int
    codes: Array
    scales: Array
    biases: Array
    dense: npt.NDArray[np.float64]

    @property
    def group_shift(self) -> int:
        """log2 of the group."""
        return self.group.bit_length() - 1

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and biases."""
        return int(self.codes.nbytes + (self.scales.nbytes + self.biases.nbytes if self.bits < 16 else 0))

    def arguments(self, sim: Simulator, first: int = 0) -> dict[int, Buffer]:
        """Codes, scales and biases as three arguments from index `first` on."""
        parts = {"codes": self.codes, "scales": self.scales, "biases": self.biases}
        return {first + i: sim.buffer(part, name) for i, (name, part) in enumerate(parts.items())}


def quantised(rng: np.random.Generator, rows: int, cols: int, bits: int, group: int = 64) -> Weights:
    """Random weights of about 1 / sqrt(cols), with every code."""
    size = 1.0 / np.sqrt(cols)
    if bits == 16:
        dense = bf16(rng.normal(0, size, (rows, cols)))
        nothing = np.zeros(1, BF16)
        return Weights(16, 32, dense, nothing, nothing, dense.astype(np.float64))
    codes = rng.integers(0, 2**bits, (rows, cols), dtype=np.uint64)
    per = 32 // bits
    shifts = np.arange(per, dtype=np.uint64) * np.uint64(bits)
    words = (codes.reshape(rows, cols // per, per) << shifts).sum(-1).astype(np.uint32)
    scales = bf16(rng.uniform(0.5, 2.0, (rows, cols // group)) * size * 4 / 2**bits)
    biases = bf16(-scales.astype(np.float32) * 2 ** (bits - 1) * rng.uniform(0.9, 1.1, scales.shape))
    wide = [np.repeat(part.astype(np.float64), group, axis=1) for part in (scales, biases)]
    return Weights(bits, group, words, scales, biases, wide[0] * codes.astype(np.float64) + wide[1])


def rms(x: Array) -> npt.NDArray[np.float64]:
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    x = np.asarray(x, np.float64)
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS))


def sigmoid(x: Array) -> npt.NDArray[np.float64]:
    """1 / (1 + e^-x)."""
    return np.asarray(1 / (1 + np.exp(-np.clip(np.asarray(x, np.float64), -700, 700))))


def silu(x: Array) -> npt.NDArray[np.float64]:
    """x sigmoid(x)."""
    return np.asarray(np.asarray(x, np.float64) * sigmoid(x))


def structure(*fields: float | int) -> bytes:
    """A parameter structure: floats as fp32, integers as 32-bit unsigned."""
    return b"".join(
        (np.float32(field) if isinstance(field, float) else np.uint32(field)).tobytes() for field in fields
    )


def run(sim: Simulator, *launches: dict[str, Any]) -> None:
    """Launches of one concurrent pass with a barrier between any two; nothing may be reported."""
    with sim.encoder(concurrent=True) as encoder:
        for i, launch in enumerate(launches):
            if i:
                encoder.barrier()
            launched(encoder, **launch)
    assert sim.diagnostics() == []


def launched(encoder: Encoder, **launch: Any) -> None:
    """One dispatch that must not be refused."""
    arguments = (launch.pop("library"), launch.pop("kernel"), launch.pop("arguments"))
    assert encoder.dispatch(*arguments, **launch), arguments[1]


def on_every_seed(sim: Simulator, compute: Callable[[], Array]) -> Array:
    """The result of `compute`, which must have the same bytes under every order of threads and groups."""
    results = []
    for seed in SEEDS:
        sim.configure(seed=seed)
        results.append(compute())
    assert len({result.tobytes() for result in results}) == 1, "the schedule shows in the result"
    return results[0]


def assert_near(found: Array, wanted: Array, magnitude: Array, stored: float, unit: float = 3e-6) -> None:
    """|found - wanted| is within the rounding of a stored value and `unit` of the summands' magnitude."""
    found = np.asarray(found, np.float64)
    assert np.isfinite(found).all()
    excess = np.abs(found - wanted) - stored * np.abs(wanted) - unit * np.asarray(magnitude)
    assert excess.max() <= 0, f"off by {np.abs(found - wanted).max():.3g}, {excess.max():.3g} too much"
