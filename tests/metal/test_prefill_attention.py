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
    """Gated output [rows, heads, dim] of rows at positions position, position + 1, ... of sequence 0.

    Splits of `split_pages` are walked, or apart if there is a library to join them; 0 has no splits.
    """
    rows, dtype = len(projected), projected.dtype
    tile = 16 if dtype == np.float32 and s.dim == 256 else 32
    group = s.heads // s.kv_heads
    pack = min(group, tile) if pack is None else pack
    pages = -(-(position + rows) // PAGE)
    splits = -(-pages // split_pages) if join else 1
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


# Position of the first row, rows, pages of a split.
SPLITS = {
    "the last split has rows of one tile only": (121, 20, 1),
    "the second split begins within a tile": (115, 30, 2),
    "all rows in the second split": (211, 5, 3),
    "a row alone, five splits": (319, 1, 1),
    "begins a split": (192, 9, 3),
    "ends the first split": (55, 9, 1),
    "five splits, a position in the last": (250, 7, 1),
}
SPLIT_SHAPES = {
    "simdgroup, 64": ("attention_prefill", Shape(heads=4, kv_heads=2)),
    "simdgroup, 128": ("attention_prefill", Shape(heads=6, kv_heads=2, dim=128, rotary=64)),
    "simdgroup, 256": ("attention_prefill", WIDE),
    "tensor, 128": ("attention_tensor", Shape(heads=6, kv_heads=2, dim=128, rotary=64)),
    "tensor, 256": ("attention_tensor", WIDE),
}
SPLIT_BUILDS = [(name, "bfloat") for name in SPLIT_SHAPES]
SPLIT_BUILDS += [(name, "float") for name in SPLIT_SHAPES if name != "tensor, 128"]


@pytest.mark.parametrize("case", SPLITS)
@pytest.mark.parametrize(("name", "activation"), SPLIT_BUILDS)
def test_splits_walked_and_splits_joined_are_the_same_bits(
    sim: Any, kernels: Any, rng: Any, name: str, activation: str, case: str
) -> None:
    """Both are softmax over all positions, and rows within the first split have the bits of no splits."""
    (file, s), (position, rows, split_pages) = SPLIT_SHAPES[name], SPLITS[case]
    dtype, stored = ACTIVATIONS[activation]
    cache = Cache.random(rng, s, [position + rows], dtype if s.dim in (64, 256) else BF16)
    library, join = kernels(file, activation), kernels("attention_prefill", activation)
    arguments = (library, s, cache, rows_of(rng, s, rows, dtype), position)
    walked = on_every_seed(sim, lambda: attend_rows(sim, *arguments, split_pages=split_pages))
    joined = on_every_seed(sim, lambda: attend_rows(sim, *arguments, split_pages=split_pages, join=join))
    assert walked.tobytes() == joined.tobytes()
    atol = 4e-6 + (2.0**-9 * 3 if file == "attention_tensor" and dtype == BF16 else 0)
    np.testing.assert_allclose(
        walked.astype(np.float64), wanted(s, cache, arguments[3], position), rtol=stored, atol=atol
    )
    first = max(0, min(rows, split_pages * PAGE - position))
    assert walked[:first].tobytes() == attend_rows(sim, *arguments)[:first].tobytes()


@pytest.mark.parametrize(("file", "s"), FILE_SHAPES)
def test_chunks_of_any_size_walk_to_the_same_bits(
    sim: Any, kernels: Any, rng: Any, file: str, s: Shape
) -> None:
    """Each row's splits are its own, whatever those of the rows in its tile."""
    cache = Cache.random(rng, s, [190], BF16)
    projected = rows_of(rng, s, 90, BF16)
    library = kernels(file)
    whole = attend_rows(sim, library, s, cache, projected, 100, split_pages=1)
    for sizes in ([1, 89], [28, 62], [27, 51, 12]):
        begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        parts = [
            attend_rows(sim, library, s, cache, projected[b : b + n], 100 + int(b), split_pages=1)
            for b, n in zip(begins, sizes, strict=True)
        ]
        assert np.concatenate(parts).tobytes() == whole.tobytes()


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
def test_a_walk_keeps_a_result_per_row_and_split(sim: Any, kernels: Any, rng: Any, file: str) -> None:
    """Keys and values are read as often as without splits; what is kept is written and read in between."""
    s = Shape(heads=8, kv_heads=1, dim=256, rotary=64, layers=1, layer=0)
    cache = Cache.random(rng, s, [320], BF16)
    projected = rows_of(rng, s, 4, BF16)
    loaded, stored = [], []
    for split_pages in (0, 1):
        sim.log_dispatches()
        attend_rows(sim, kernels(file), s, cache, projected, 316, split_pages=split_pages)
        (work,) = sim.dispatches()
        loaded.append(work.bytes_loaded)
        stored.append(work.bytes_stored)
    kept = 4 * 4 * s.heads * s.dim
    assert loaded[1] - loaded[0] == stored[1] - stored[0] == 4 * kept


@pytest.mark.parametrize("file", ["attention_prefill", "attention_tensor"])
def test_threadgroup_memory_leaves_room_for_two(kernels: Any, file: str) -> None:
    library = kernels(file)
    assert max(library.threadgroup_memory(kernel) for kernel in library.kernels) <= 28 * 1024
