"""simdgroup, quadgroup and matrix functions, and counters that order threadgroups."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from metalsim.simulator import Simulator
from metalsim_helpers import KERNELS, kinds

F32 = npt.NDArray[np.float32]


def tree_sum(values: F32) -> F32:
    """Sum along the last axis with partners at distance 1, 2, 4, ... in float32."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def run(sim: Simulator, kernel: str, data: npt.NDArray[np.generic], results: int) -> npt.NDArray[np.generic]:
    out = sim.buffer(data.nbytes * results, "out")
    with sim.encoder() as encoder:
        library = sim.compile(KERNELS / "groups.metal")
        encoder.dispatch(library, kernel, {0: sim.buffer(data), 1: out}, threads=len(data), group=64)
    return out.array(data.dtype, (results, len(data)))


def test_reductions_and_scans(seeded: Simulator) -> None:
    x = np.random.default_rng(0).normal(size=128).astype(np.float32)
    out = run(seeded, "reductions", x, 12)
    simd, quad = x.reshape(-1, 32), x.reshape(-1, 4)

    def spread(per_group: F32) -> F32:
        return np.repeat(per_group, len(x) // len(per_group))

    assert (out[0] == spread(tree_sum(simd))).all()  # bit for bit, in the GPU's order
    assert (out[5] == spread(tree_sum(quad))).all()
    for row, expected in ((1, simd.max(1)), (2, simd.min(1)), (6, quad.max(1)), (7, quad.min(1))):
        assert (out[row] == spread(expected)).all()
    for row, groups in ((3, simd), (8, quad)):
        assert np.allclose(out[row], np.cumsum(groups, 1, dtype=np.float64).ravel(), atol=1e-5)
        exclusive = np.cumsum(groups, 1, dtype=np.float64) - groups
        assert np.allclose(out[row + 1], exclusive.ravel(), atol=1e-5)
    assert np.allclose(out[10], spread(simd.prod(1)), rtol=1e-5)
    assert np.allclose(out[11], spread(quad.prod(1)), rtol=1e-5)
    assert seeded.diagnostics() == []


def test_shuffles(seeded: Simulator) -> None:
    x = np.random.default_rng(1).integers(0, 1000, 64, dtype=np.uint32)
    out = run(seeded, "moves", x, 13)
    base, lane, quad_lane = np.arange(64) // 32 * 32, np.arange(64) % 32, np.arange(64) % 4
    quad_base = np.arange(64) - quad_lane
    expected = [
        x[base + lane * 7 % 32],
        x[base + (lane ^ 5)],
        x[base + 9],
        x[base + (lane + 3) % 32],
        x[base + (lane - 3) % 32],
        np.where(lane + 4 < 32, x[np.minimum(base + lane + 4, 63)], 99),
        np.where(lane >= 4, x[np.maximum(base + lane - 4, 0)], 99),
        x[quad_base + 3 - quad_lane],
        x[quad_base + (quad_lane ^ 2)],
        x[quad_base + 1],
    ]
    for row, values in enumerate(expected):
        assert (out[row] == values).all(), row
    inside = quad_lane < 3
    assert (out[10][inside] == x[quad_base + np.minimum(quad_lane + 1, 3)][inside]).all()
    inside = quad_lane > 0
    assert (out[11][inside] == x[quad_base + np.maximum(quad_lane - 1, 0)][inside]).all()
    assert (out[12] == x[base]).all()
    assert seeded.diagnostics() == []


def test_votes(seeded: Simulator) -> None:
    x = np.random.default_rng(2).integers(0, 2**32, 96, dtype=np.uint32)
    x[32:64] |= 1
    out = run(seeded, "votes", x, 10)
    odd = (x & 1).astype(bool)

    def per_group(width: int, function: object) -> npt.NDArray[np.uint32]:
        values = [function(group) for group in odd.reshape(-1, width)]  # type: ignore[operator]
        return np.repeat(np.array(values, np.uint32), width)

    def ballot(group: npt.NDArray[np.bool_]) -> int:
        return sum(int(bit) << i for i, bit in enumerate(group))

    assert (out[0] == per_group(32, ballot)).all()
    assert (out[1] == per_group(32, np.all)).all()
    assert (out[2] == per_group(32, np.any)).all()
    assert (out[3] == (np.arange(96) % 32 == 0)).all()
    assert (out[4] == per_group(4, ballot)).all()
    assert (out[5] == per_group(4, np.all)).all()
    assert (out[6] == per_group(4, np.any)).all()
    groups = x.reshape(-1, 32)
    for row, reduce in ((7, np.bitwise_or), (8, np.bitwise_xor), (9, np.bitwise_and)):
        assert (out[row] == np.repeat(reduce.reduce(groups, 1), 32)).all()
    assert seeded.diagnostics() == []


def run_quads(sim: Simulator, kernel: str) -> F32:
    out = sim.buffer(4 * 64, "out")
    with sim.encoder() as encoder:
        encoder.dispatch(sim.compile(KERNELS / "groups.metal"), kernel, {0: out}, threads=64, group=64)
    return out.array(np.float32)


def test_quads_may_diverge_from_each_other(seeded: Simulator) -> None:
    out = run_quads(seeded, "divergent_quads")
    assert (out == np.repeat(6.0 * (np.arange(16) + 1), 4)).all()
    assert seeded.diagnostics() == []


def test_lanes_of_a_quad_may_not_diverge(seeded: Simulator) -> None:
    run_quads(seeded, "divergent_lanes")
    assert kinds(seeded) == {"simd-divergence"}


def test_partial_simdgroups_reduce_over_their_lanes(sim: Simulator) -> None:
    source = """
    #include <metal_stdlib>
    using namespace metal;
    kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
      out[i] = simd_sum(float(i + 1));
    }"""
    out = sim.buffer(4 * 37)
    with sim.encoder() as encoder:
        encoder.dispatch(sim.compile(source), "k", {0: out}, threads=37, group=37)
    expected = [sum(range(1, 33))] * 32 + [sum(range(33, 38))] * 5
    assert out.array(np.float32).tolist() == expected
    assert sim.diagnostics() == []


def test_matrices_of_half_with_transposed_load(seeded: Simulator) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(2, 8, 8)).astype(np.float16)
    c = seeded.buffer(256, "c")
    with seeded.encoder() as encoder:
        library = seeded.compile(KERNELS / "groups.metal")
        arguments = {0: seeded.buffer(a), 1: seeded.buffer(b), 2: c}
        encoder.dispatch(library, "matrix_transposed", arguments, groups=1, group=32)
    assert np.allclose(c.array(np.float32, (8, 8)), a.astype(float) @ b.T.astype(float) + 0.5, atol=1e-4)
    assert seeded.diagnostics() == []


def test_matrix_load_is_no_barrier(seeded: Simulator) -> None:
    a = seeded.buffer(np.ones(64, np.float16))
    with seeded.encoder() as encoder:
        library = seeded.compile(KERNELS / "groups.metal")
        encoder.dispatch(library, "matrix_without_barrier", {0: a, 2: seeded.buffer(256)}, groups=1, group=32)
    assert "race-threadgroup" in kinds(seeded)


def run_last_block(sim: Simulator, annotated: bool, before: bool, after: bool) -> tuple[float, float]:
    x = np.random.default_rng(4).normal(size=640).astype(np.float32)
    out = sim.buffer(4, "out")
    with sim.encoder() as encoder:
        encoder.dispatch(
            sim.compile(KERNELS / "last_block.metal"),
            "last_block_sum",
            {0: sim.buffer(x), 1: sim.buffer(80, "partial"), 2: sim.buffer(np.zeros(1, np.uint32)), 3: out},
            threads=640,
            group=64,
            constants={0: np.bool_(annotated), 1: np.bool_(before), 2: np.bool_(after)},
        )
    return float(out.array(np.float32)[0]), float(x.sum(dtype=np.float64))


def test_annotated_counter_orders_threadgroups(seeded: Simulator) -> None:
    result, expected = run_last_block(seeded, True, True, True)
    assert result == pytest.approx(expected, abs=1e-4)
    assert seeded.diagnostics() == []


@pytest.mark.parametrize(
    ("annotated", "before", "after"),
    [(False, True, True), (True, False, True), (True, True, False)],
    ids=["no annotation", "no barrier before", "no barrier after"],
)
def test_counter_orders_nothing_without_its_barriers(
    seeded: Simulator, annotated: bool, before: bool, after: bool
) -> None:
    run_last_block(seeded, annotated, before, after)
    assert kinds(seeded) == {"race-across-groups"}


def test_device_fences_order_threadgroups(seeded: Simulator) -> None:
    library = seeded.compile(KERNELS / "last_block.metal", language="3.2")
    x, out = np.arange(320, dtype=np.float32), seeded.buffer(4, "out")
    with seeded.encoder() as encoder:
        arguments = {
            0: seeded.buffer(x),
            1: seeded.buffer(40),
            2: seeded.buffer(np.zeros(1, np.uint32)),
            3: out,
        }
        encoder.dispatch(library, "fenced_sum", arguments, threads=320, group=32)
    assert out.array(np.float32)[0] == x.sum()
    assert seeded.diagnostics() == []
