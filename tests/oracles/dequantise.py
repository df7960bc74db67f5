"""Turns packed weights into numbers, from the definitions of the formats.

Affine: unsigned codes packed as one little-endian bit stream per row, w = scale * code + bias.
MX formats (OCP Microscaling v1.0): mxfp4 holds e2m1 codes, mxfp8 e4m3 codes, with one e8m0 scale per 32
values. nvfp4: e2m1 codes with one e4m3 scale per 16 values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracles.tensorfile import Array

Float64 = NDArray[np.float64]


def _minifloat(exponent_bits: int, mantissa_bits: int) -> Float64:
    """Values of all codes of a small float with a sign bit, subnormals and the usual bias (no infinities)."""
    codes = np.arange(2 ** (1 + exponent_bits + mantissa_bits))
    mantissa = (codes % 2**mantissa_bits) / 2**mantissa_bits
    exponent = codes >> mantissa_bits & 2**exponent_bits - 1
    sign = np.where(codes >> exponent_bits + mantissa_bits, -1.0, 1.0)
    bias = 2 ** (exponent_bits - 1) - 1
    normal, subnormal = (1 + mantissa) * 2.0 ** (exponent - bias), mantissa * 2.0 ** (1 - bias)
    return np.asarray(sign * np.where(exponent > 0, normal, subnormal))


E2M1 = _minifloat(2, 1)
E4M3 = _minifloat(4, 3)
E4M3[[0x7F, 0xFF]] = np.nan  # "fn": all ones is not a number
E8M0 = 2.0 ** (np.arange(256) - 127.0)
E8M0[255] = np.nan

_FLOAT_MODES = {(4, 32): (E2M1, E8M0), (8, 32): (E4M3, E8M0), (4, 16): (E2M1, E4M3)}


def unpack(packed: Array, bits: int) -> NDArray[np.int64]:
    """Codes [..., n] of `bits` each from uint32 words [..., n * bits / 32], least significant bit first."""
    stream = np.unpackbits(np.ascontiguousarray(packed).view(np.uint8), axis=-1, bitorder="little")
    codes = stream.reshape(*packed.shape[:-1], -1, bits).astype(np.int64)
    return codes @ (1 << np.arange(bits, dtype=np.int64))


def dequantise(weight: Array, scales: Array, biases: Array | None, width: int) -> Float64:
    """Weights [..., width]; bits and group follow from the sizes; without `biases` it is a float mode."""
    bits = weight.shape[-1] * 32 // width
    group = width // scales.shape[-1]
    codes = unpack(weight, bits).reshape(*scales.shape, group)
    if biases is not None:
        values = scales.astype(np.float64)[..., None] * codes + biases.astype(np.float64)[..., None]
    else:
        elements, factors = _FLOAT_MODES[bits, group]
        values = factors[scales][..., None] * elements[codes]
    return values.reshape(*scales.shape[:-1], width)
