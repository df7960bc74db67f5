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
from oracles.dequantise import E2M1, E4M3, E8M0  # noqa: E402

__all__ = ["Buffer", "Encoder", "Library", "Simulator"]  # for tests: this module makes metalsim importable

Array = npt.NDArray[Any]
BF16 = ml_dtypes.bfloat16
EPS = 1e-6

# Type of the activations by the name of the build, and the relative rounding of storing one.
ACTIVATIONS = {"bfloat": (BF16, 2.0**-8), "float": (np.float32, 2.0**-22)}


def language(name: str) -> str:
    """Version of Metal that a kernel file is written in."""
    return "4.0" if name in ("attention_tensor", "matrix_tensor") else "3.1"


def bf16(values: Array) -> Array:
    """Rounded to bf16, as the type of 16 bits."""
    return np.asarray(values, np.float32).astype(BF16)


@dataclass(frozen=True)
class Weights:
    """A matrix as kernels take it, and in float64; `format` is the suffix of the kernels' names."""

    format: str
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
        return int(
            self.codes.nbytes + sum(part.nbytes for part in (self.scales, self.biases) if part.size > 1)
        )

    def arguments(self, sim: Simulator, first: int = 0) -> dict[int, Buffer]:
        """Codes, scales and biases as three arguments from index `first` on."""
        parts = {"codes": self.codes, "scales": self.scales, "biases": self.biases}
        return {first + i: sim.buffer(part, name) for i, (name, part) in enumerate(parts.items())}


NOTHING = np.zeros(1, BF16)  # bound where a format has no scales or biases
PLAIN = {"b16": BF16, "f16": np.float16, "f32": np.float32}
# Bits of a code, columns of a scale, numbers by code and by scale, as the standards define them.
SMALL_FLOATS = {
    "mxfp4": (4, 32, E2M1, E8M0),
    "mxfp8": (8, 32, E4M3, E8M0),
    "nvfp4": (4, 16, E2M1, E4M3),
}


def packed(codes: Array, bits: int) -> Array:
    """Codes [rows, cols] as one little-endian bit stream per row, in words of 32 bits."""
    stream = (codes[..., None] >> np.arange(bits)) & 1
    octets = np.packbits(stream.astype(np.uint8).reshape(len(codes), -1), axis=1, bitorder="little")
    return octets.view(np.uint32)


def quantised(
    rng: np.random.Generator, rows: int, cols: int, kind: int | str, group: int = 64, scale: Any = BF16
) -> Weights:
    """Random weights of about 1 / sqrt(cols), with every code; `kind` is the bits, or the format's name.

    `scale` is the type of affine scales and biases. bf16 scales times codes are exact in fp32.
    """
    size = 1.0 / np.sqrt(cols)
    name = f"b{kind}" if isinstance(kind, int) else kind
    if name in PLAIN:
        dense = rng.normal(0, size, (rows, cols)).astype(PLAIN[name])
        return Weights(name, 32, dense, NOTHING, NOTHING, dense.astype(np.float64))
    if name in SMALL_FLOATS:
        bits, group, numbers, factors = SMALL_FLOATS[name]
        codes = rng.integers(0, 2**bits, (rows, cols))
        codes[np.isnan(numbers[codes])] = 1
        low, high = (121, 124) if factors is E8M0 else (8, 0x38)
        scales = rng.integers(low, high, (rows, cols // group), dtype=np.uint8)
        dense = np.repeat(factors[scales], group, axis=1) * numbers[codes]
        return Weights(name, group, packed(codes, bits), scales, np.zeros(1, np.uint8), dense)
    bits = int(name[1:])
    codes = rng.integers(0, 2**bits, (rows, cols))
    scales = (rng.uniform(0.5, 2.0, (rows, cols // group)) * size * 4 / 2**bits).astype(scale)
    biases = -scales.astype(np.float64) * 2 ** (bits - 1) * rng.uniform(0.9, 1.1, scales.shape)
    biases = biases.astype(scale)
    wide = [np.repeat(part.astype(np.float64), group, axis=1) for part in (scales, biases)]
    return Weights(name, group, packed(codes, bits), scales, biases, wide[0] * codes + wide[1])


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
