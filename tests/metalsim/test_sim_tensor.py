"""Tensor operations of Metal 4: results, the lane map, masks at the extents, and what the headers refuse."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from metalsim.msl import static_check
from metalsim.simulator import Simulator
from metalsim_helpers import KERNELS, kinds

BF16 = ml_dtypes.bfloat16
SOURCE = KERNELS / "tensor.metal"


@pytest.mark.parametrize("transposed", [False, True])
def test_fragments_of_a_simdgroup(seeded: Simulator, transposed: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(16, 16)).astype(BF16), rng.normal(size=(16, 32)).astype(BF16)
    stored = np.ascontiguousarray(b.T) if transposed else b
    c = seeded.buffer(4 * 512, "c")
    kernel = "fragments_transposed" if transposed else "fragments_plain"
    library = seeded.compile(SOURCE, language="4.0")
    with seeded.encoder() as encoder:
        arguments = {0: seeded.buffer(a), 1: seeded.buffer(stored), 2: c}
        encoder.dispatch(library, kernel, arguments, groups=1, group=32)
    wanted = a.astype(float) @ b.astype(float) + 0.5
    assert np.allclose(c.array(np.float32, (16, 32)), wanted, atol=1e-5)
    assert seeded.diagnostics() == []


def four(sim: Simulator, rows: int, depth: int, group: int = 128, define: tuple[str, ...] = ()) -> bool:
    """Whether the product by four simdgroups is right."""
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(rows, depth)).astype(BF16), rng.normal(size=(33, depth)).astype(BF16)
    c = sim.buffer(4 * 32 * rows, "c")
    with sim.encoder() as encoder:
        arguments = {0: sim.buffer(a), 1: sim.buffer(b), 2: c, 3: np.array([rows, depth], np.uint32)}
        library = sim.compile(SOURCE, language="4.0", define=define)
        encoder.dispatch(library, "four", arguments, groups=1, group=group)
    wanted = a.astype(float) @ b[:32].astype(float).T
    return bool(np.allclose(c.array(np.float32, (rows, 32)), wanted, atol=1e-4))


@pytest.mark.parametrize("rows", [32, 19])
def test_four_simdgroups_with_rows_beyond_the_extent(seeded: Simulator, rows: int) -> None:
    assert four(seeded, rows, 48)
    assert seeded.diagnostics() == []


def test_a_tile_that_is_written_while_it_is_read_is_a_race(sim: Simulator) -> None:
    four(sim, 32, 48, define=("FORGET",))
    assert "race-threadgroup" in kinds(sim)


def test_another_number_of_simdgroups_than_the_scope(sim: Simulator) -> None:
    four(sim, 32, 16, group=64)
    assert "tensor-scope" in kinds(sim)


def test_k_beyond_the_extent(sim: Simulator) -> None:
    four(sim, 32, 24)
    assert "tensor-extent" in kinds(sim)


def test_the_kernels_pass_the_static_check(compiler: Path) -> None:
    assert static_check.check(SOURCE, language="4.0") == []


LEFT = "tensor<device bfloat, dextents<int32_t, 2>, tensor_inline> left"
SIMDGROUP = "matmul2d<descriptor, execution_simdgroup"
PAIR = "<bfloat, bfloat, float>();\n    auto sum"


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (PAIR, PAIR.replace("bfloat", "half", 1), "other types"),
        ("left[e] = a[r * 16u + k]", "left[e] = 1.5f", "no implicit conversion to bfloat"),
        ("matmul2d_descriptor(16, 32, 16,", "matmul2d_descriptor(8, 8, 16,", "one of them of 16"),
        (f"{SIMDGROUP}>", f"{SIMDGROUP}s<4>>", "need execution_simdgroup"),
        (LEFT, LEFT.replace("device ", ""), "address space"),
        (LEFT, LEFT.replace("device", "device const"), "const elements"),
        ("matmul2d_descriptor(32, 32, 16,", "matmul2d_descriptor(32, 32, 32,", "static extent"),
    ],
)
def test_what_the_headers_refuse(
    compiler: Path, tmp_path: Path, before: str, after: str, reason: str
) -> None:
    text = SOURCE.read_text()
    assert before in text
    file = tmp_path / "tensor.metal"
    file.write_text(text.replace(before, after))
    assert reason in "\n".join(static_check.check(file, language="4.0"))


def test_tensors_need_metal_4(compiler: Path) -> None:
    assert "needs Metal 4.0" in "\n".join(static_check.check(SOURCE, language="3.1"))
