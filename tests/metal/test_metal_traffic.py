"""Bytes of a decoded token at the widths of the 35B model, layer by layer, as the simulator counts them.

16 experts instead of 256 are stored, which changes no byte that a token reads; contents are random bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from metal_reference import BF16, EPS, Array, Buffer, launched, structure

pytestmark = pytest.mark.slow

HIDDEN, EXPERTS, TOP_K, WIDTH = 2048, 16, 8, 512


class Weights:
    """Quantised buffers of random codes, and the bytes that one token reads of them."""

    def __init__(self, sim: Any, rng: np.random.Generator, rows: int, cols: int, bits: int = 4) -> None:
        groups = cols // 64
        codes = rng.integers(0, 2**32, rows * cols * bits // 32, dtype=np.uint32)
        scales = np.full(rows * groups, 2.0**-9, BF16)
        self.buffers = [sim.buffer(codes), sim.buffer(scales), sim.buffer(-scales)]
        self.nbytes = codes.nbytes + 2 * scales.nbytes

    def arguments(self, first: int = 0) -> dict[int, Buffer]:
        return {first + i: buffer for i, buffer in enumerate(self.buffers)}


class Layer:
    """What both kinds of layers share: rows of activations, launches, and the mixture."""

    def __init__(self, sim: Any, kernels: Any, rng: np.random.Generator) -> None:
        self.sim, self.kernels, self.rng = sim, kernels, rng
        self.gain = sim.buffer(np.ones(HIDDEN, np.float32))
        self.residual = sim.buffer(rng.normal(0, 1, HIDDEN).astype(np.float32))
        self.mixed = sim.buffer(np.ones(4096, BF16))
        self.encoder: Any = None
        self.weights = 0  # bytes of weights that the token reads
        self.state = 0  # bytes of state and cache, read and written

    def launch(self, file: str, kernel: str, arguments: dict[int, Any], groups: Any, group: int) -> None:
        self.encoder.barrier()
        library = self.kernels(file)
        launched(
            self.encoder, library=library, kernel=kernel, arguments=arguments, groups=groups, group=group
        )

    def project(self, rows: int, out: Buffer) -> None:
        w = Weights(self.sim, self.rng, rows, HIDDEN)
        self.weights += w.nbytes
        arguments = w.arguments() | {3: self.residual, 4: self.gain, 5: out}
        arguments[6] = structure(1, HIDDEN, rows, rows, 6, EPS)
        self.launch("project", "norm_project_b4_m1", arguments, -(-rows // 64), 256)

    def project_add(self, kernel: str, more: dict[int, Any]) -> None:
        w = Weights(self.sim, self.rng, HIDDEN, 4096)
        self.weights += w.nbytes
        arguments = w.arguments() | {3: self.mixed, 4: self.residual} | more
        arguments[5] = structure(1, 4096, HIDDEN, HIDDEN, 6, EPS)
        self.launch("project", kernel, arguments, HIDDEN // 16, 128)

    def mixture(self) -> None:
        sim, rng = self.sim, self.rng
        router = Weights(sim, rng, 257, HIDDEN, 8)  # all of it, though 16 experts exist
        normed, logits = sim.buffer(2 * HIDDEN), sim.buffer(4 * 257)
        arguments = router.arguments() | {3: self.residual, 4: self.gain, 5: logits, 6: normed}
        arguments[7] = structure(1, HIDDEN, 257, 257, 6, EPS, 1)
        self.launch("experts", "route_b8_m1", arguments, 17, 256)
        up, down = (Weights(sim, rng, EXPERTS * n, k) for n, k in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)))
        shared_up, shared_down = Weights(sim, rng, 2 * WIDTH, HIDDEN), Weights(sim, rng, HIDDEN, WIDTH)
        slots = TOP_K + 1
        acts, routing = sim.buffer(2 * slots * WIDTH), sim.buffer(4 * (2 * TOP_K + 1))
        shape = structure(EXPERTS, TOP_K, 1, 1, 0, slots, WIDTH, WIDTH, WIDTH, slots, HIDDEN, 6, 6)
        arguments = up.arguments() | shared_up.arguments(3) | {6: normed, 7: logits, 8: acts, 9: routing}
        self.launch("experts", "experts_up_b4", arguments | {10: shape}, (WIDTH // 32, slots, 1), 256)
        arguments = down.arguments() | shared_down.arguments(3) | {6: acts, 7: routing, 8: self.residual}
        self.launch("experts", "experts_down_b4", arguments | {9: shape}, (HIDDEN // 16, 1, 1), 128)
        self.weights += router.nbytes + shared_up.nbytes + shared_down.nbytes
        self.weights += (up.nbytes + down.nbytes) * TOP_K // EXPERTS

    def assert_traffic(self, launches: int) -> None:
        """Distinct bytes at most 1.03 times, all accesses below 1.6 times what the layer must move."""
        work = self.sim.dispatches()
        assert self.sim.diagnostics() == []
        assert len(work) == launches
        needed = self.weights + self.state
        distinct = sum(d.bytes_read + d.bytes_written for d in work)
        issued = sum(d.bytes_loaded + d.bytes_stored for d in work)
        assert needed <= distinct <= 1.03 * needed
        assert issued < 1.6 * needed


def floats(sim: Any, values: Array) -> Buffer:
    return sim.buffer(values.astype(np.float32))  # type: ignore[no-any-return]


def test_gated_deltanet_layer(sim: Any, kernels: Any, rng: Any) -> None:
    channels, values, heads = 8192, 4096, 32
    layer = Layer(sim, kernels, rng)
    projected = sim.buffer(2 * (channels + values + 2 * heads))
    state = floats(sim, np.zeros((heads, 128, 128)))
    squares = sim.buffer(4 * heads * 8)
    sim.log_dispatches()
    with sim.encoder(concurrent=True) as layer.encoder:
        layer.project(channels + values + 2 * heads, projected)
        arguments = {0: projected, 1: floats(sim, np.ones((4, channels))), 2: floats(sim, np.zeros(heads))}
        arguments |= {3: floats(sim, np.zeros(heads)), 4: floats(sim, np.ones(128))}
        arguments |= {5: sim.buffer(np.zeros((16, channels), BF16)), 6: state, 7: layer.mixed, 8: squares}
        arguments |= {9: sim.buffer(np.array([40], np.uint32)), 11: state}
        arguments[10] = structure(1, 16, heads, 128, 4, channels + values + 2 * heads, 1e-6)
        layer.launch("delta_rule", "delta_rule_k4_m1", arguments, (8, heads), 128)
        # the state both ways, the taps, three remembered inputs and the new one
        layer.state = 2 * 4 * heads * 128 * 128 + channels * (4 * 4 + 4 * 2)
        layer.project_add("project_add_heads_b4_m1", {6: squares, 7: structure(heads, 7, 8, EPS)})
        layer.mixture()
    layer.assert_traffic(6)


def test_attention_layer(sim: Any, kernels: Any, rng: Any) -> None:
    """At a context of 1,024: a split is one page, so that this is the worst case of the partial results."""
    heads, kv_heads, dim, length = 16, 2, 256, 1024
    layer = Layer(sim, kernels, rng)
    stride = 2 * dim * (heads + kv_heads)
    projected, splits = sim.buffer(2 * stride), length // 64
    page = kv_heads * 2 * 64 * dim
    cache = sim.buffer(rng.normal(0, 1, splits * page).astype(BF16))
    pages, sequences = sim.buffer(np.arange(splits, dtype=np.uint32)), sim.buffer(np.zeros(1, np.uint32))
    positions = sim.buffer(np.array([length - 1], np.uint32))
    norm, tables = floats(sim, np.ones(dim)), [floats(sim, np.ones((n, 32, 2))) for n in (2, 512)]
    partial, statistics = sim.buffer(4 * heads * splits * dim), sim.buffer(8 * heads * splits)
    shape = structure(heads, kv_heads, 32, stride, splits, page, 0, splits, 4096, 32768, EPS)
    sim.log_dispatches()
    with sim.encoder(concurrent=True) as layer.encoder:
        layer.project(stride, projected)
        arguments = {0: projected, 1: norm, 2: norm, 3: tables[0], 4: tables[1], 5: positions}
        arguments |= {6: sequences, 7: pages, 8: cache, 9: shape}
        layer.launch("attention", "rotary_append_bfloat_d256", arguments, (5, 1), 128)
        arguments = {0: projected, 1: positions, 2: sequences, 3: pages, 4: cache, 5: partial}
        arguments |= {6: statistics, 7: shape}
        layer.launch("attention", "attend_bfloat_d256_h4", arguments, (kv_heads * 2, splits, 1), 128)
        arguments = {0: partial, 1: statistics, 2: projected, 3: positions, 4: layer.mixed, 5: shape}
        layer.launch("attention", "attend_combine", arguments, (heads, dim // 32, 1), 256)
        layer.state = 2 * kv_heads * dim * 2 * (length + 1)
        layer.project_add("project_add_b4_m1", {})
        layer.mixture()
    layer.assert_traffic(8)
