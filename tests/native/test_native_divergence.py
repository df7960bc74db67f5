"""The engine as shipped diverges less from exact arithmetic than 8-bit activations do on the same weights.

llama.cpp multiplies Q4_0 weights with activations of Q8_0: blocks of 32 numbers as bytes with an fp16 scale.
Its distance from the same weights in fp32 is that rounding (keys and values in fp16 and routers in fp32 add
next to nothing); `ByteActivations` is that model in float64, on the checkpoint that lily runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from native_arithmetic import RoundedReference
from native_support import Ids, Tiny, feed, ids_of, model_of
from numpy.typing import NDArray
from oracles.result import FloatArray, Result
from oracles.shapes import SHAPES, Shape

ReferenceOf = Callable[[Path, Ids], Result]

# Four layers, three of them recurrent, like every slice of the family; hidden sizes from 128 to 512.
SLICES: dict[str, Shape] = {
    "moe": SHAPES["moe"],
    "family_heads": SHAPES["family_heads"],
    "top6": SHAPES["top6"],
    "wide": replace(SHAPES["moe"], layers=4, hidden=512, experts=32, top_k=8, moe_width=64, shared_width=64),
}


class ByteActivations(RoundedReference):
    """The float64 reference whose quantised products read activations as Q8_0 blocks."""

    def _rounds(self, name: str) -> bool:
        return super()._rounds(name) and not name.endswith(".mlp.gate")

    def _rounded(self, x: FloatArray, name: str) -> FloatArray:
        if not self._rounds(name):
            return x
        blocks = x.reshape(len(x), -1, 32)
        step = np.abs(blocks).max(-1, keepdims=True) / 127
        integers = np.rint(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0))
        return np.asarray((integers * step.astype(np.float16)).reshape(x.shape))


def log_softmax(logits: FloatArray) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def divergence(exact: FloatArray, other: FloatArray) -> float:
    """Kullback-Leibler divergence of each row's distribution from the exact one, in nats, averaged."""
    p, q = log_softmax(exact), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("name", SLICES)
def test_divergence_is_far_below_that_of_byte_activations(
    tiny: Tiny, reference: ReferenceOf, name: str
) -> None:
    path = tiny(SLICES[name], "mlx-4bit-g64")
    model = model_of(path, kv_dtype="bfloat16")
    ours, theirs = [], []
    for seed in range(2):
        ids = ids_of(SLICES[name].vocab, 32, seed=seed)
        exact = reference(path, ids).logits
        ours.append(divergence(exact, feed(model, model.new_sequence(), ids)))
        theirs.append(divergence(exact, ByteActivations(path).forward(ids).logits))
    measured = f"{np.mean(ours):.2e} nats a token, with byte activations {np.mean(theirs):.2e}"
    print(f"{name}: {measured}")
    assert np.mean(theirs) > 1e-6, measured
    assert np.mean(ours) <= 0.5 * np.mean(theirs), measured
