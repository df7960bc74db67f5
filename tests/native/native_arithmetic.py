"""The CPU backend's documented arithmetic in NumPy: see docs/numerics.md.

Two uses. `integer_product` and `float_product` repeat the matrix kernels' roundings exactly, from codes that
`oracles.dequantise` unpacks. `RoundedReference` is the float64 reference whose quantised products read
activations rounded to 16-bit integers: it says how far that rounding alone carries.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracles.dequantise import E2M1, E4M3, E8M0, unpack
from oracles.reference import Reference, sigmoid, silu, softmax
from oracles.result import FloatArray
from oracles.tensorfile import Array

Float32 = NDArray[np.float32]
BLOCK = 64  # columns that share an activation scale


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a b + c rounded once (the product of two fp32 is exact in fp64, the sum nearly always)."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def lane_sum(lanes: Float32) -> Float32:
    """The sum of 16 lanes by halving."""
    width = lanes.shape[-1]
    while width > 1:
        width //= 2
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return np.asarray(lanes[..., 0])


def rms_norm(x: Float32, weight: Float32, eps: float) -> Float32:
    """x [T, H] by its root mean square: squares summed in 16 lanes; H is a multiple of 16."""
    squares = np.zeros((len(x), 16), np.float32)
    for begin in range(0, x.shape[1], 16):
        part = x[:, begin : begin + 16]
        squares = fma(part, part, squares)
    mean = lane_sum(squares) / np.float32(x.shape[1])
    inverse = np.float32(1) / np.sqrt(mean + np.float32(eps))
    return x * inverse[:, None] * weight


def round_rows(x: Float32) -> tuple[NDArray[np.int64], Float32]:
    """Integers [T, padded] and their scales [T, padded / 64]: scale = max|x| / 32639 for each 64 columns."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)))
    blocks = padded.reshape(len(x), -1, BLOCK)
    top = np.abs(blocks).max(-1)
    scales = top / np.float32(32639)
    with np.errstate(divide="ignore"):
        inverse = np.where(top > 0, np.float32(32639) / top, np.float32(0))
    return np.rint(blocks * inverse[..., None]).astype(np.int64).reshape(padded.shape), scales


def stored_parts(
    weight: Array, scales: Array, biases: Array | None, width: int
) -> tuple[NDArray[np.int64], Float32, Float32 | None]:
    """Integer codes [out, width], scales and biases [out, groups] of any format but mxfp8.

    e2m1 codes count halves, so that they are integers; their scales are halved in return.
    """
    codes = unpack(weight, weight.shape[-1] * 32 // width)
    if biases is not None:
        return codes, scales.astype(np.float32), biases.astype(np.float32)
    factors = E8M0 if width // scales.shape[-1] == 32 else E4M3
    return (2 * E2M1[codes]).astype(np.int64), (factors[scales] / 2).astype(np.float32), None


def integer_product(x: Float32, weight: Array, scales: Array, biases: Array | None) -> Float32:
    """x [T, width] times a quantised matrix [out, width]: exact integer sums, fp32 sums over blocks."""
    width = x.shape[1]
    codes, scale, bias = stored_parts(weight, scales, biases, width)
    group = width // scale.shape[1]
    block = min(group, BLOCK)
    integers, x_scales = round_rows(x)
    acc = np.zeros((len(x), len(codes)), np.float32)
    for begin in range(0, width, block):
        part = integers[:, begin : begin + block]
        step = x_scales[:, begin // BLOCK]
        dots = (part[:, : width - begin] @ codes[:, begin : begin + block].T).astype(np.float32)
        acc = fma(dots, scale[:, begin // group] * step[:, None], acc)
        if bias is not None:
            sums = step * part.sum(-1).astype(np.float32)
            acc = fma(np.broadcast_to(bias[:, begin // group], acc.shape), sums[:, None], acc)
    return acc


def expanded_weights(weight: Array, scales: Array | None, biases: Array | None, width: int) -> Float32:
    """A matrix [out, width] in fp32 as the float kernel sees it."""
    if scales is None:
        return weight.astype(np.float32)
    if biases is None and weight.shape[-1] * 32 // width == 8:
        scale = np.repeat(E8M0[scales], 32, -1)
        return (scale * E4M3[unpack(weight, 8)]).astype(np.float32)
    codes, scale, bias = stored_parts(weight, scales, biases, width)
    wide = np.repeat(scale, width // scale.shape[1], -1)
    if bias is None:
        return wide * codes.astype(np.float32)
    return fma(wide, codes.astype(np.float32), np.repeat(bias, width // scale.shape[1], -1))


def float_product(x: Float32, weights: Float32) -> Float32:
    """x [T, width] times [out, width] in four interleaved fp32 sums."""
    acc = [np.zeros((len(x), len(weights)), np.float32) for _ in range(4)]
    for column in range(x.shape[1]):
        acc[column % 4] = fma(x[:, column, None], weights[None, :, column], acc[column % 4])
    return (acc[0] + acc[1]) + (acc[2] + acc[3])


class RoundedReference(Reference):
    """The float64 reference with activations rounded where the backend rounds them."""

    def _rounds(self, name: str) -> bool:
        weight = self._tensors.get(f"{name}.weight")
        scales = self._tensors.get(f"{name}.scales")
        if weight is None or scales is None:
            return False
        is_mxfp8 = scales.dtype == np.uint8 and weight.shape[-1] * 4 == scales.shape[-1] * 32
        return not is_mxfp8

    def _rounded(self, x: FloatArray, name: str) -> FloatArray:
        """x as integers times scales, if the matrix `name` is multiplied by integers."""
        if not self._rounds(name):
            return x
        padding = -x.shape[-1] % BLOCK
        blocks = np.pad(x, ((0, 0), (0, padding))).reshape(len(x), -1, BLOCK)
        step = np.abs(blocks).max(-1, keepdims=True) / 32639
        integers = np.rint(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0))
        return (integers * step).reshape(len(x), -1)[:, : x.shape[-1]]

    def linear(self, x: FloatArray, name: str) -> FloatArray:
        return super().linear(self._rounded(x, name), name)

    def mixture(self, x: FloatArray, name: str) -> tuple[FloatArray, NDArray[np.int64]]:
        probabilities = softmax(self.linear(x, f"{name}.gate"))
        chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, : self.top_k]
        share = np.take_along_axis(probabilities, chosen, -1)
        share = share / share.sum(-1, keepdims=True)
        gate, up, down = self.expert_weights(name)
        stacked = f"{name}.switch_mlp"
        for_gate, for_up = (self._rounded(x, f"{stacked}.{part}") for part in ("gate_proj", "up_proj"))
        y: Any = np.zeros_like(x)
        for e in np.unique(chosen):
            rows, slots = np.nonzero(chosen == e)
            gated = silu(for_gate[rows] @ gate[e].T) * (for_up[rows] @ up[e].T)
            gated = self._rounded(gated, f"{stacked}.down_proj")
            y[rows] += share[rows, slots, None] * (gated @ down[e].T)
        shared = self.mlp(x, f"{name}.shared_expert")
        return y + sigmoid(self.linear(x, f"{name}.shared_expert_gate")) * shared, chosen
