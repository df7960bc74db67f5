"""Counts of dispatches, stages, barriers and bytes are those that the kernel's text implies."""

from __future__ import annotations

import numpy as np
from metalsim.simulator import Simulator

SOURCE = """
#include <metal_stdlib>
using namespace metal;
// Each thread reads one element of its own and all of a 16-float table; writes its element twice.
kernel void table(device const float* in [[buffer(0)]], device const float* weights [[buffer(1)]],
                  device float* out [[buffer(2)]], constant uint& n [[buffer(3)]],
                  uint i [[thread_position_in_grid]]) {
  volatile device float* o = out + i;
  float s = in[i];
  for (uint k = 0; k < n; k++) s += weights[k];
  *o = 0;
  *o = s;
}
kernel void bump(device atomic_uint* counter [[buffer(0)]]) {
  atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
}
"""


def test_bytes_are_counted_once_and_in_all(seeded: Simulator) -> None:
    library = seeded.compile(SOURCE)
    n = 100
    x, w, y = (
        seeded.buffer(np.ones(n, np.float32)),
        seeded.buffer(np.ones(16, np.float32)),
        seeded.buffer(4 * n),
    )
    seeded.reset_counters()
    seeded.log_dispatches()
    with seeded.encoder() as encoder:
        for _ in range(2):
            encoder.dispatch(library, "table", {0: x, 1: w, 2: y, 3: np.uint32(16)}, threads=n, group=32)
    first, second = seeded.dispatches()
    assert (first.bytes_read, first.bytes_written) == (4 * n + 64, 4 * n)
    assert (first.bytes_loaded, first.bytes_stored) == (4 * n + 64 * n, 8 * n)
    assert (second.bytes_read, second.bytes_written) == (first.bytes_read, first.bytes_written)
    assert (first.kernel, first.groups, first.threads) == ("table", (4, 1, 1), (32, 1, 1))
    counts = seeded.counters()
    assert counts["bytes_read"] == 2 * first.bytes_read
    assert counts["bytes_loaded"] == 2 * first.bytes_loaded
    assert counts["constant_bytes"] == 8
    assert counts["threads"] == 256
    assert (y.array(np.float32) == 17).all()


def test_atomics_count_as_read_and_written(sim: Simulator) -> None:
    library, counter = sim.compile(SOURCE), sim.buffer(np.zeros(1, np.uint32))
    sim.reset_counters()
    with sim.encoder() as encoder:
        encoder.dispatch(library, "bump", {0: counter}, threads=50, group=50)
    counts = sim.counters()
    assert (counts["bytes_read"], counts["bytes_written"]) == (4, 4)
    assert (counts["bytes_loaded"], counts["bytes_stored"]) == (200, 200)
    assert counter.array(np.uint32)[0] == 50


def test_stages_are_groups_that_nothing_orders(sim: Simulator) -> None:
    library = sim.compile(SOURCE)
    counters = [sim.buffer(np.zeros(1, np.uint32)) for _ in range(5)]

    def bump(encoder: object, which: int) -> None:
        encoder.dispatch(library, "bump", {0: counters[which]}, groups=1, group=1)  # type: ignore[attr-defined]

    sim.reset_counters()
    sim.log_dispatches()
    with sim.encoder(concurrent=True) as encoder:
        bump(encoder, 0)
        bump(encoder, 1)
        encoder.barrier()
        bump(encoder, 2)
        encoder.barrier()
        encoder.barrier()
        bump(encoder, 3)
        bump(encoder, 4)
    counts = sim.counters()
    assert (counts["dispatches"], counts["barriers"], counts["stages"]) == (5, 3, 3)
    assert [d.stage for d in sim.dispatches()] == [1, 1, 2, 3, 3]
    with sim.encoder() as encoder:
        bump(encoder, 0)
        bump(encoder, 1)
    assert sim.counters()["stages"] == 5  # a serial encoder orders each dispatch
    assert sim.counters()["encoders"] == 2
    assert sim.diagnostics() == []
