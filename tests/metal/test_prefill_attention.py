"""Attention of many rows over pages: both sides of tiles, packs and splits, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from metal_reference import ACTIVATIONS, BF16, Array, launched, on_every_seed, structure
from test_metal_attention import PAGE, Cache, Shape, reference, rows_of


def attend_rows(
    sim: Any,
    library: Any,
    s: Shape,
    cache: Cache,
    projected: Array,
    position: int,
    *,
    pack: int | None = None,
    split_pages: int = 0,
    join: Any = None,
) -> Array:
    """Gated output [rows, heads, dim] of rows at positions position, position + 1, ... of sequence 0."""
    rows, dtype = len(projected), projected.dtype
    tile = 16 if dtype == np.float32 and s.dim == 256 else 32
    group = s.heads // s.kv_heads
    pack = min(group, tile) if pack is None else pack
    pages = -(-(position + rows) // PAGE)
    splits = -(-pages // split_pages) if split_pages else 1
    cached = "bfloat" if cache.pool.dtype == BF16 else "float"
    offset = s.layer * s.kv_heads * 2 * PAGE * s.dim
    sizes = (rows, s.heads, s.kv_heads, pack, s.stride, s.page_stride, offset, split_pages or pages, splits)
    inputs, places = sim.buffer(projected, "projected"), sim.buffer(np.array([position], np.uint32))
    out = sim.buffer(np.zeros((rows, s.heads, s.dim), dtype), "out")
    partial = sim.buffer(4 * rows * s.heads * splits * s.dim, "partial")
    statistics = sim.buffer(8 * rows * s.heads * splits, "statistics")
    first = {0: inputs, 1: places, 2: sim.buffer(cache.table[0], "pages"), 3: sim.buffer(cache.pool, "cache")}
    first |= {4: out, 5: partial, 6: statistics, 7: structure(*sizes)}
    with sim.encoder(concurrent=True) as encoder:
        launched(
            encoder,
            library=library,
            kernel=f"attend_rows_{cached}_d{s.dim}",
            arguments=first,
            groups=(s.kv_heads * -(-group // pack), -(-rows // (tile // pack)), splits),
            group=128,
        )
        if splits > 1:
            encoder.barrier()
            second = {0: partial, 1: statistics, 2: inputs, 3: places, 4: out, 5: structure(*sizes)}
            launched(
                encoder,
                library=join,
                kernel="join_splits",
                arguments=second,
                groups=(s.heads, rows),
                group=s.dim,
            )
    assert sim.diagnostics() == []
    return np.asarray(out.array(dtype, (rows, s.heads, s.dim)).copy())


def wanted(s: Shape, cache: Cache, projected: Array, position: int) -> Array:
    rows = len(projected)
    return reference(s, cache, projected, position + np.arange(rows), np.zeros(rows, int))


CASES = {
    "one row": (Shape(), 1, 0),
    "a tile of four rows, one more": (Shape(), 5, 0),
    "ends a page": (Shape(), 9, 55),
    "begins a page": (Shape(), 9, 64),
    "across two pages": (Shape(), 70, 30),
    "far behind": (Shape(heads=4, kv_heads=2), 11, 203),
    "six heads for one, 30 of 32 rows": (Shape(heads=12, kv_heads=2, dim=32, rotary=32), 13, 60),
    "a head each": (Shape(heads=2, kv_heads=2, dim=32, rotary=32), 40, 10),
    "more heads than a tile": (Shape(heads=40, kv_heads=1, dim=32, rotary=32), 3, 65),
    "wide": (Shape(heads=4, kv_heads=1, dim=128, rotary=64), 10, 58),
    "width of the 35B model": (Shape(heads=8, kv_heads=1, dim=256, rotary=64, layers=1, layer=0), 6, 126),
    "width of the 35B model, one page": (Shape(heads=8, kv_heads=1, dim=256, rotary=64), 5, 40),
    "wide, three pages": (Shape(heads=6, kv_heads=2, dim=128, rotary=64), 12, 170),
}
FILES = [("attention_prefill", name) for name in CASES]
FILES += [("attention_tensor", name) for name, case in CASES.items() if case[0].dim >= 128]
WIDE = Shape(heads=4, kv_heads=2, dim=256, rotary=64, layers=1, layer=0)
FILE_SHAPES = [("attention_prefill", Shape(heads=4, kv_heads=2)), ("attention_tensor", WIDE)]


@pytest.mark.parametrize("activation", ["bfloat", "float"])
@pytest.mark.parametrize(("file", "name"), FILES)
def test_rows_attend_to_what_precedes_them(
    sim: Any, kernels: Any, rng: Any, file: str, name: str, activation: str
) -> None:
    """Weights of tensor operations are bf16 where activations are: 2^-9 of each value's weight."""
    s, rows, position = CASES[name]
    if file == "attention_tensor" and s.dim == 128:
        activation = "bfloat"  # tiles of fp32 are too large
    dtype, stored = ACTIVATIONS[activation]
    atol = 4e-6 + (2.0**-9 * 3 if file == "attention_tensor" and dtype == BF16 else 0)
    cached = dtype if s.dim in (64, 256) else BF16  # fp32 caches are built for these widths only
    cache = Cache.random(rng, s, [position + rows], cached)
    projected = rows_of(rng, s, rows, dtype)
    library = kernels(file, activation)
    found = on_every_seed(sim, lambda: attend_rows(sim, library, s, cache, projected, position))
    np.testing.assert_allclose(
        found.astype(np.float64), wanted(s, cache, projected, position), rtol=stored, atol=atol
    )


@pytest.mark.parametrize("split_pages", [1, 2, 3])
@pytest.mark.parametrize(("file", "s"), FILE_SHAPES)
def test_splits_join_to_the_same_output(
    sim: Any, kernels: Any, rng: Any, file: str, s: Shape, split_pages: int
) -> None:
    """Rows on both sides of a split: the earlier ones have no position in the last split."""
    cache = Cache.random(rng, s, [205], BF16)
    projected = rows_of(rng, s, 20, np.float32)
    library, join = kernels(file, "float"), kernels("attention_prefill", "float")
    found = on_every_seed(
        sim, lambda: attend_rows(sim, library, s, cache, projected, 185, split_pages=split_pages, join=join)
    )
    np.testing.assert_allclose(found, wanted(s, cache, projected, 185), atol=4e-6)


@pytest.mark.parametrize(("file", "s"), FILE_SHAPES)
def test_rows_within_the_first_split_have_the_bits_of_none(
    sim: Any, kernels: Any, rng: Any, file: str, s: Shape
) -> None:
    """Of 30 rows the first 13 have positions below 128, where the second split of two pages begins."""
    cache = Cache.random(rng, s, [145], BF16)
    projected = rows_of(rng, s, 30, BF16)
    library, join = kernels(file), kernels("attention_prefill")
    whole = attend_rows(sim, library, s, cache, projected, 115)
    split = attend_rows(sim, library, s, cache, projected, 115, split_pages=2, join=join)
    assert split[:13].tobytes() == whole[:13].tobytes()
    np.testing.assert_allclose(split.astype(float), whole.astype(float), rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize("pack", [1, 2, 3])
def test_packing_heads_changes_no_byte(sim: Any, kernels: Any, rng: Any, pack: int) -> None:
    s = Shape(heads=12, kv_heads=2, dim=32, rotary=32)
    cache = Cache.random(rng, s, [150], BF16)
    projected = rows_of(rng, s, 37, BF16)
    arguments = (kernels("attention_prefill"), s, cache, projected, 113)
    assert attend_rows(sim, *arguments, pack=pack).tobytes() == attend_rows(sim, *arguments).tobytes()


@pytest.mark.parametrize(("file", "s"), FILE_SHAPES)
def test_chunks_of_any_size_have_the_same_bits(sim: Any, kernels: Any, rng: Any, file: str, s: Shape) -> None:
    cache = Cache.random(rng, s, [170], BF16)
    projected = rows_of(rng, s, 130, BF16)
    library = kernels(file)
    whole = attend_rows(sim, library, s, cache, projected, 40)
    for sizes in ([1, 129], [64, 66], [30, 97, 3]):
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        parts = [
            attend_rows(sim, library, s, cache, projected[b : b + n], 40 + int(b))
            for b, n in zip(begins, sizes, strict=True)
        ]
        assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_large_scores_overflow_nothing(sim: Any, kernels: Any, rng: Any) -> None:
    s = Shape(heads=4)
    cache = Cache.random(rng, s, [100], BF16)
    projected = rows_of(rng, s, 10, np.float32) * 300
    found = attend_rows(sim, kernels("attention_prefill", "float"), s, cache, projected, 90)
    np.testing.assert_allclose(found, wanted(s, cache, projected, 90), atol=5e-3)


@pytest.mark.parametrize("file", ["attention_prefill", "attention_tensor"])
def test_keys_and_values_are_read_once_per_kv_head_and_tile(
    sim: Any, kernels: Any, rng: Any, file: str
) -> None:
    """Eight rows of eight heads are two tiles; a head a tile reads eight times as much."""
    s = Shape(heads=8, kv_heads=1, dim=256, rotary=64, layers=1, layer=0)
    cache = Cache.random(rng, s, [128], BF16)
    projected = rows_of(rng, s, 8, BF16)
    once = 128 * 2 * 256 * 2
    own = projected.nbytes // (2 * s.dim * 9) * 2 * s.dim * 8  # queries and gates
    for pack, reads in ((8, 2), (1, 8)):
        sim.log_dispatches()
        attend_rows(sim, kernels(file), s, cache, projected, 120, pack=pack)
        (work,) = sim.dispatches()
        assert once <= work.bytes_read <= once + own + 64
        padding = 4 if pack == 1 else 1  # eight of 32 rows; queries of the others repeat the last
        assert reads * once <= work.bytes_loaded <= reads * once * 1.02 + padding * 2 * own


@pytest.mark.parametrize("file", ["attention_prefill", "attention_tensor"])
def test_threadgroup_memory_leaves_room_for_two(kernels: Any, file: str) -> None:
    library = kernels(file)
    assert max(library.threadgroup_memory(kernel) for kernel in library.kernels) <= 28 * 1024
