"""Correct kernels give the results of plain NumPy, under every schedule, without a report."""

from __future__ import annotations

import numpy as np
import pytest
from metalsim.simulator import Simulator
from metalsim_helpers import KERNELS, run_sort


@pytest.mark.parametrize(("rows", "columns"), [(70, 256), (3, 64), (16, 512)])
@pytest.mark.parametrize("residual", [True, False])
def test_quantised_gemv(seeded: Simulator, rows: int, columns: int, residual: bool) -> None:
    rng = np.random.default_rng(rows)
    words = rng.integers(0, 2**32, (rows, columns // 8), dtype=np.uint32)
    scales, biases = (rng.normal(0, 0.1, (rows, columns // 64)).astype(np.float16) for _ in range(2))
    x, r = rng.normal(size=columns).astype(np.float16), rng.normal(size=rows).astype(np.float16)
    library = seeded.compile(KERNELS / "q4_gemv.metal")
    y = seeded.buffer(2 * rows, "y")
    arguments = {
        i: seeded.buffer(a, n)
        for i, (a, n) in enumerate([(words, "w"), (scales, "s"), (biases, "b"), (x, "x")])
    }
    if residual:
        arguments[4] = seeded.buffer(r, "residual")
    with seeded.encoder() as encoder:
        encoder.dispatch(
            library,
            "q4_gemv_f16_g64",
            {**arguments, 5: y, 6: np.uint32(columns), 7: np.uint32(rows)},
            groups=(rows + 15) // 16,
            group=128,
            constants={0: np.bool_(residual)},
        )
    nibbles = (words[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    weights = nibbles.reshape(rows, columns) * np.repeat(scales, 64, 1).astype(float) + np.repeat(
        biases, 64, 1
    )
    expected = weights @ x.astype(float) + (r if residual else 0)
    assert np.allclose(y.array(np.float16), expected, rtol=2e-3, atol=2e-3)
    assert seeded.diagnostics() == []


@pytest.mark.parametrize(("n", "bins"), [(5000, 200), (255, 7), (257, 256)])
def test_counting_sort_with_atomics_and_barriers(seeded: Simulator, n: int, bins: int) -> None:
    keys = np.random.default_rng(n).integers(0, bins, n, dtype=np.uint32)
    order = run_sort(seeded, keys, bins)
    assert sorted(order) == list(range(n))
    assert (np.diff(keys[order].astype(int)) >= 0).all()
    assert seeded.diagnostics() == []


@pytest.mark.parametrize(("heads", "keys", "window"), [(3, 77, 0), (2, 100, 33), (1, 1, 0)])
def test_attention_with_threadgroup_memory(seeded: Simulator, heads: int, keys: int, window: int) -> None:
    rng = np.random.default_rng(keys)
    q = rng.normal(size=(heads, 64)).astype(np.float32)
    k, v = (rng.normal(size=(heads, keys, 64)).astype(np.float32) for _ in range(2))
    out = seeded.buffer(q.nbytes, "out")
    parameters = np.array([(keys, 64, 0.125, 1)], "i4,i4,f4,i4")
    library = seeded.compile(KERNELS / "attn.metal")
    with seeded.encoder() as encoder:
        encoder.dispatch(
            library,
            "attn_decode_f32_64",
            {
                0: seeded.buffer(q, "q"),
                1: seeded.buffer(k, "k"),
                2: seeded.buffer(v, "v"),
                3: out,
                4: parameters,
            },
            groups=heads,
            group=128,
            constants={3: np.int32(window)},
            threadgroup_memory={0: 4 * 64 * 4},
        )
    first = max(0, keys - window) if window else 0
    for head in range(heads):
        scores = k[head, first:].astype(float) @ q[head] * 0.125
        weights = np.exp(scores - scores.max())
        expected = weights / weights.sum() @ v[head, first:]
        assert np.abs(out.array(np.float32, (heads, 64))[head] - expected).max() < 1e-5
    assert seeded.diagnostics() == []


def test_simdgroup_matrix_product(seeded: Simulator) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(8, 32)).astype(np.float32), rng.normal(size=(32, 8)).astype(np.float32)
    c = seeded.buffer(256, "c")
    library = seeded.compile(KERNELS / "attn.metal")
    with seeded.encoder() as encoder:
        arguments = {0: seeded.buffer(a), 1: seeded.buffer(b), 2: c, 3: np.int32(32)}
        encoder.dispatch(library, "mm8", arguments, groups=1, group=32)
    assert np.allclose(c.array(np.float32, (8, 8)), a.astype(float) @ b, atol=1e-4)
    assert seeded.diagnostics() == []


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "fast"])
def test_fast_and_checked_builds_agree(sim: Simulator, checked: bool) -> None:
    sim.configure(checks=checked)
    library = sim.compile(KERNELS / "faults.metal")
    x = np.arange(1000, dtype=np.float32)
    y = sim.buffer(4000, "y")
    with sim.encoder() as encoder:
        encoder.dispatch(library, "clean_axpy", {0: sim.buffer(x), 1: y}, threads=1000, group=64)
    assert (y.array(np.float32) == 2 * x + 1).all()


def test_edge_threadgroups_are_trimmed(sim: Simulator) -> None:
    source = """
    #include <metal_stdlib>
    using namespace metal;
    kernel void sizes(device uint* out [[buffer(0)]], uint3 i [[thread_position_in_grid]],
                      uint3 n [[threads_per_threadgroup]], uint3 d [[dispatch_threads_per_threadgroup]],
                      uint3 grid [[threads_per_grid]]) {
      out[i.y * grid.x + i.x] = n.x * 100 + n.y * 10 + d.x;
    }"""
    out = sim.buffer(4 * 15, "out")
    with sim.encoder() as encoder:
        encoder.dispatch(sim.compile(source), "sizes", {0: out}, threads=(5, 3), group=(4, 2))
    expected = [
        [100 * (4 if x < 4 else 1) + 10 * (2 if y < 2 else 1) + 4 for x in range(5)] for y in range(3)
    ]
    assert out.array(np.uint32, (3, 5)).tolist() == expected
    assert sim.diagnostics() == []


def test_half_and_bfloat_round_after_each_operation(sim: Simulator) -> None:
    # With float intermediates 2048h + 1 - 2048 would be 1; the half sum 2049 rounds to even.
    source = """
    #include <metal_stdlib>
    using namespace metal;
    kernel void k(device half* h [[buffer(0)]], device bfloat* b [[buffer(1)]],
                  device float* f [[buffer(2)]]) {
      h[1] = (h[0] + 1.0h) - h[0];
      b[1] = bfloat(f[0]);
      f[1] = f[0] * 0.1;
    }"""
    h = sim.buffer(np.array([2048, 0], np.float16))
    f = sim.buffer(np.array([1.00390625 + 2**-20, 0], np.float32))
    b = sim.buffer(np.zeros(2, np.uint16))
    with sim.encoder() as encoder:
        encoder.dispatch(sim.compile(source), "k", {0: h, 1: b, 2: f}, groups=1, group=1)
    assert h.array(np.float16)[1] == 0
    assert b.array(np.uint16)[1] == 0x3F81
    assert f.array(np.float32)[1] == f.array(np.float32)[0] * np.float32(0.1)


def test_memory_lasts_as_long_as_a_buffer_or_a_view_of_it(sim: Simulator) -> None:
    before = sim.allocated_bytes()
    view = sim.buffer(np.arange(4, dtype="u4")).array("u4")
    assert sim.allocated_bytes() == before + 16
    np.testing.assert_array_equal(view, range(4))
    part = view[1:]
    del view
    assert sim.allocated_bytes() == before + 16
    np.testing.assert_array_equal(part, (1, 2, 3))
    del part
    assert sim.allocated_bytes() == before
