"""Each planted fault is reported with its kind and its line, and its correct counterpart is not."""

from __future__ import annotations

import numpy as np
import pytest
from metalsim.simulator import Simulator
from metalsim_helpers import KERNELS, kinds, run_sort


def line_of(text: str) -> int:
    """Line of the first occurrence in faults.metal."""
    lines = (KERNELS / "faults.metal").read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)


def run(
    sim: Simulator, kernel: str, threads: int = 64, group: int = 64, n: int | None = None, **options: object
) -> None:
    library = sim.compile(KERNELS / "faults.metal")
    inputs, out = sim.buffer(np.ones(1024, np.float32), "in"), sim.buffer(4096, "out")
    with sim.encoder() as encoder:
        arguments = {0: inputs, 1: out, 2: np.uint32(threads if n is None else n)}
        encoder.dispatch(library, kernel, arguments, threads=threads, group=group, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kernel", "options", "kind", "at"),
    [
        ("missing_barrier", {}, "race-threadgroup", "out[t] = s[63 - t]"),
        ("wrong_flags", {}, "race-device", "float v = out[63 - t]"),
        ("past_the_end", {"threads": 1000}, "out-of-bounds", "out[i] = in[i + 25]"),
        ("wild_index", {"n": 0xFFFFFF00}, "out-of-bounds", "out[i + far] = in[i]"),
        ("threadgroup_overrun", {"threadgroup_memory": {0: 256}}, "out-of-bounds", "s[t + 1] = in[t]"),
        ("uninitialised_threadgroup", {}, "uninitialised", "out[t] = s[t];"),
        ("early_return", {}, "barrier-divergence", None),
        ("two_barriers", {}, "barrier-divergence", None),
        ("divergent_simd", {}, "simd-divergence", "s += simd_sum(1.0f)"),
        ("inactive_lane", {}, "simd-inactive-lane", "simd_shuffle_down(float(t), 1)"),
        ("between_groups", {"threads": 128}, "race-across-groups", "out[0] += 1.0f"),
        ("simd_exchange", {"threads": 32, "group": 32}, "race-threadgroup", None),
        ("simd_exchange_none", {"threads": 32, "group": 32}, "race-threadgroup", None),
        ("misaligned_vector", {"threads": 4, "n": 4}, "misaligned", "uint4 v ="),
        ("local_array", {"n": 4}, "array-bounds", "out[i] = a[n]"),
        ("wide_shift", {"n": 32}, "shift", "out[i] = in[i] << n"),
        ("zero_division", {"n": 0}, "division", "out[i] = in[i] / n"),
        ("too_much_memory", {}, "threadgroup-memory", None),
    ],
)
def test_planted_fault_is_found(
    seeded: Simulator, kernel: str, options: dict[str, object], kind: str, at: str | None
) -> None:
    run(seeded, kernel, **options)  # type: ignore[arg-type]
    found = [d for d in seeded.diagnostics() if d.kind == kind]
    assert found, f"reported {kinds(seeded)}"
    assert found[0].kernel == kernel
    if at is not None:
        assert any(d.where.startswith(f"faults.metal:{line_of(at)}") for d in found), found


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ("clean_flags", {}),
        ("clean_simd_exchange", {"threads": 32, "group": 32}),
        ("clean_exchange", {"threads": 1000, "group": 250}),
        ("clean_many_barriers", {}),
        ("local_array", {"n": 3}),
        ("wide_shift", {"n": 31}),
        ("misaligned_vector", {"threads": 4, "n": 16}),
    ],
)
def test_correct_kernel_is_not_reported(seeded: Simulator, kernel: str, options: dict[str, object]) -> None:
    run(seeded, kernel, **options)  # type: ignore[arg-type]
    assert seeded.diagnostics() == []


def test_update_after_reads_of_an_earlier_dispatch(seeded: Simulator) -> None:
    """The update's own read doesn't hide the one before it, which may still be going on."""
    library = seeded.compile(
        """
#include <metal_stdlib>
using namespace metal;
kernel void copy(device const float* a [[buffer(0)]], device float* b [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) { b[i] = a[i]; }
kernel void add(device float* a [[buffer(0)]], uint i [[thread_position_in_grid]]) { a[i] += 1.0f; }
"""
    )
    for barrier in (True, False):
        a, b = seeded.buffer(np.ones(64, np.float32), "a"), seeded.buffer(256, "b")
        with seeded.encoder(concurrent=True) as encoder:
            encoder.dispatch(library, "copy", {0: a, 1: b}, threads=64, group=32)
            if barrier:
                encoder.barrier()
            encoder.dispatch(library, "add", {0: a}, threads=64, group=32)
        assert kinds(seeded) == (set() if barrier else {"dispatch-hazard"})


def test_missing_barrier_between_dispatches(seeded: Simulator) -> None:
    keys = np.random.default_rng(0).integers(0, 200, 5000, dtype=np.uint32)
    run_sort(seeded, keys, 200, barrier=False)
    assert "dispatch-hazard" in kinds(seeded)


def test_plain_write_races_with_an_atomic(sim: Simulator) -> None:
    library = sim.compile(KERNELS / "faults.metal")
    counter = sim.buffer(np.zeros(1, np.uint32), "counter")
    with sim.encoder() as encoder:
        encoder.dispatch(library, "mixed_atomic", {0: counter, 1: counter}, threads=64, group=64)
    assert "race-device" in kinds(sim)


def test_write_through_constant_bytes(sim: Simulator) -> None:
    source = """
    #include <metal_stdlib>
    using namespace metal;
    kernel void k(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) { out[i] = 1; }"""
    with sim.encoder() as encoder:
        encoder.dispatch(sim.compile(source), "k", {0: np.ones(4, np.float32)}, threads=4, group=4)
    assert kinds(sim) == {"write-constant"}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({0: "in", 2: np.uint32(64)}, "missing-argument"),
        ({0: "in", 1: "out", 2: np.uint16(64)}, "short-argument"),
        ({0: ("in", 2), 1: "out", 2: np.uint32(10)}, "misaligned"),
    ],
)
def test_bindings_are_checked(sim: Simulator, arguments: dict[int, object], kind: str) -> None:
    library = sim.compile(KERNELS / "faults.metal")
    buffers = {"in": sim.buffer(np.ones(100, np.float32), "in"), "out": sim.buffer(400, "out")}
    bound = {
        i: (buffers[a[0]], a[1]) if isinstance(a, tuple) else buffers[a] if isinstance(a, str) else a
        for i, a in arguments.items()
    }
    with sim.encoder() as encoder:
        encoder.dispatch(library, "past_the_end", bound, threads=64, group=64)  # type: ignore[arg-type]
    assert kind in kinds(sim)


def test_access_through_an_unbound_argument(sim: Simulator) -> None:
    source = """
    #include <metal_stdlib>
    using namespace metal;
    kernel void k(device float* a [[buffer(0)]], device float* b [[buffer(1)]],
                  constant uint& far [[buffer(2)]]) { b[0] = 1; a[far] = 1; }"""
    with sim.encoder() as encoder:
        arguments = {1: sim.buffer(4, "b"), 2: np.uint32(1 << 20)}
        done = encoder.dispatch(sim.compile(source), "k", arguments, groups=1, group=1)
    assert not done
    assert kinds(sim) == {"missing-argument", "null-buffer"}


def test_access_below_the_bound_offset(sim: Simulator) -> None:
    source = """
    #include <metal_stdlib>
    using namespace metal;
    kernel void k(device float* a [[buffer(0)]], constant int& back [[buffer(1)]]) { a[-back] = 1; }"""
    buffer = sim.buffer(64, "a")
    with sim.encoder() as encoder:
        encoder.dispatch(sim.compile(source), "k", {0: (buffer, 32), 1: np.int32(1)}, groups=1, group=1)
    assert kinds(sim) == {"below-binding"}


def test_released_buffer(sim: Simulator) -> None:
    library = sim.compile(KERNELS / "faults.metal")
    gone = sim.buffer(np.ones(64, np.float32), "gone")
    out = sim.buffer(256, "out")
    with sim.encoder() as encoder:
        gone.free()
        encoder.dispatch(library, "clean_axpy", {0: gone, 1: out}, threads=64, group=64)
    assert "use-after-free" in kinds(sim)


def test_threadgroup_larger_than_the_pipeline_allows_is_dropped(sim: Simulator) -> None:
    sim.limit_threads(32, "clean_axpy")
    library = sim.compile(KERNELS / "faults.metal")
    out = sim.buffer(np.zeros(64, np.float32), "out")
    with sim.encoder() as encoder:
        done = encoder.dispatch(library, "clean_axpy", {0: sim.buffer(256), 1: out}, threads=64, group=64)
    assert not done
    assert kinds(sim) == {"threads-per-group"}
    assert (out.array(np.float32) == 0).all()


def test_memory_that_only_the_gpu_writes_must_be_written_before_it_is_read(sim: Simulator) -> None:
    library = sim.compile(KERNELS / "faults.metal")
    private = sim.buffer(256, "private", track_initialisation=True)
    out = sim.buffer(256, "out")
    with sim.encoder() as encoder:
        encoder.dispatch(library, "clean_axpy", {0: private, 1: out}, threads=64, group=64)
    assert kinds(sim) == {"uninitialised"}
    sim.clear_diagnostics()
    with sim.encoder() as encoder:
        encoder.dispatch(library, "clean_axpy", {0: out, 1: private}, threads=64, group=64)
        encoder.dispatch(library, "clean_axpy", {0: private, 1: out}, threads=64, group=64)
    assert sim.diagnostics() == []


def test_faults_are_found_after_the_dispatch_number_wrapped(sim: Simulator) -> None:
    library = sim.compile(KERNELS / "faults.metal")
    a, b = sim.buffer(np.ones(4, np.float32), "a"), sim.buffer(np.ones(4, np.float32), "b")
    private = sim.buffer(16, "private", track_initialisation=True)
    with sim.encoder(concurrent=True) as encoder:
        encoder.dispatch(library, "clean_axpy", {0: a, 1: private}, threads=4, group=4)
        for _ in range(5000):
            encoder.barrier()
            encoder.dispatch(library, "clean_axpy", {0: a, 1: b}, threads=4, group=4)
        encoder.barrier()
        encoder.dispatch(library, "clean_axpy", {0: private, 1: b}, threads=4, group=4)
        assert sim.diagnostics() == []
        encoder.dispatch(library, "clean_axpy", {0: b, 1: a}, threads=4, group=4)
    assert kinds(sim) == {"dispatch-hazard"}
    assert sim.counters()["dispatches"] == 5003
