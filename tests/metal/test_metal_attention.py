"""Rotary embedding and append, attention over pages, combine: odd lengths on each side of every boundary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from metal_reference import ACTIVATIONS, BF16, EPS, Array, on_every_seed, rms, run, sigmoid, structure

PAGE = 64
FINE = 512
THETA = 1e7


@dataclass(frozen=True)
class Shape:
    """Heads of an attention layer; `layers` share a page, `layer` is the one under test."""

    heads: int = 8
    kv_heads: int = 1
    dim: int = 64
    rotary: int = 16
    layers: int = 2
    layer: int = 1
    medium: int = 4096  # lengths from which a split has 4 and 16 pages
    long: int = 32768

    @property
    def stride(self) -> int:
        return 2 * self.dim * (self.heads + self.kv_heads)

    @property
    def page_stride(self) -> int:
        return self.layers * self.kv_heads * 2 * PAGE * self.dim

    def structure(self, table_stride: int, splits: int) -> bytes:
        offset = self.layer * self.kv_heads * 2 * PAGE * self.dim
        return structure(
            self.heads, self.kv_heads, self.rotary // 2, self.stride, table_stride, self.page_stride, offset,
            splits, self.medium, self.long, EPS,
        )  # fmt: skip

    def split_positions(self, length: int) -> int:
        return PAGE * (1 if length < self.medium else 4 if length < self.long else 16)


def angles(positions: Array, rotary: int) -> Array:
    """Rotary angles [positions, pairs] in float64."""
    return np.outer(positions, THETA ** (-2.0 * np.arange(rotary // 2) / rotary))


def tables(rotary: int, top: int) -> tuple[Array, Array]:
    """(cos, sin) of every 512th position up to `top`, and of the first 512 positions."""

    def table(positions: Array) -> Array:
        a = angles(positions, rotary)
        return np.stack([np.cos(a), np.sin(a)], -1).astype(np.float32)

    return table(np.arange(top // FINE + 1) * FINE), table(np.arange(FINE))


@dataclass
class Cache:
    """Pages of some sequences, scattered over a pool, with keys and values of `lengths` positions in them."""

    pool: Array  # [pages, layers, kv_heads, 2, 64 * dim]
    table: Array  # [sequences, pages per table]
    keys: list[Array]  # per sequence [length, kv_heads, dim]
    values: list[Array]

    @staticmethod
    def random(rng: np.random.Generator, s: Shape, lengths: list[int], dtype: Any) -> Cache:
        pages = max(-(-length // PAGE) for length in lengths) + 1
        numbers = rng.permutation(len(lengths) * pages).astype(np.uint32).reshape(len(lengths), pages)
        pool = np.full((numbers.size, s.layers, s.kv_heads, 2, PAGE * s.dim), np.nan, dtype)
        keys = [rng.normal(0, 1, (n, s.kv_heads, s.dim)).astype(dtype) for n in lengths]
        values = [rng.normal(0, 1, (n, s.kv_heads, s.dim)).astype(dtype) for n in lengths]
        for sequence, length in enumerate(lengths):
            for p in range(length):
                layer = pool[numbers[sequence, p // PAGE], s.layer]
                layer[:, 0].reshape(s.kv_heads, s.dim, PAGE)[:, :, p % PAGE] = keys[sequence][p]
                layer[:, 1].reshape(s.kv_heads, PAGE, s.dim)[:, p % PAGE] = values[sequence][p]
        return Cache(pool, numbers, keys, values)


def attend(
    sim: Any,
    library: Any,
    s: Shape,
    cache: Cache,
    projected: Array,
    positions: Array,
    sequences: Array,
    pack: int,
) -> Array:
    """Gated output [rows, heads, dim] by the two launches."""
    rows, dtype = len(projected), projected.dtype
    splits = max(-(-int(p + 1) // s.split_positions(int(p + 1))) for p in positions) + 1  # and one to leave
    cached = "bfloat" if cache.pool.dtype == BF16 else "float"
    partial, statistics = (
        sim.buffer(4 * rows * s.heads * splits * s.dim),
        sim.buffer(8 * rows * s.heads * splits),
    )
    out = sim.buffer(np.zeros((rows, s.heads, s.dim), dtype), "out")
    row_positions = sim.buffer(positions.astype(np.uint32), "positions")
    inputs = sim.buffer(projected, "projected")
    shape = s.structure(cache.table.shape[1], splits)
    packs = -(-(s.heads // s.kv_heads) // pack)
    first = {
        0: inputs,
        1: row_positions,
        2: sim.buffer(sequences.astype(np.uint32)),
        3: sim.buffer(cache.table),
    }
    first |= {4: sim.buffer(cache.pool, "cache"), 5: partial, 6: statistics, 7: shape}
    second = {0: partial, 1: statistics, 2: inputs, 3: row_positions, 4: out, 5: shape}
    run(
        sim,
        {
            "library": library,
            "kernel": f"attend_{cached}_d{s.dim}_h{pack}",
            "arguments": first,
            "groups": (s.kv_heads * packs, splits, rows),
            "group": 128,
        },
        {
            "library": library,
            "kernel": "attend_combine",
            "arguments": second,
            "groups": (s.heads, s.dim // 32, rows),
            "group": 256,
        },
    )
    return out.array(dtype, (rows, s.heads, s.dim)).copy()


def reference(s: Shape, cache: Cache, projected: Array, positions: Array, sequences: Array) -> Array:
    wide = projected.astype(np.float64)
    result = np.zeros((len(projected), s.heads, s.dim))
    for row, (position, sequence) in enumerate(zip(positions, sequences, strict=True)):
        for head in range(s.heads):
            query, gate = np.split(wide[row, 2 * head * s.dim :][: 2 * s.dim], 2)
            kv = head // (s.heads // s.kv_heads)
            keys = cache.keys[sequence][: position + 1, kv].astype(np.float64)
            scores = keys @ query / np.sqrt(s.dim)
            weights = np.exp(scores - scores.max())
            values = cache.values[sequence][: position + 1, kv].astype(np.float64)
            result[row, head] = weights @ values / weights.sum() * sigmoid(gate)
    return result


def rows_of(rng: np.random.Generator, s: Shape, rows: int, dtype: Any) -> Array:
    return rng.normal(0, 1.5, (rows, s.stride)).astype(dtype)


CASES = {
    "one position": (Shape(), [0]),
    "a page is full": (Shape(), [63]),
    "a page has one position": (Shape(), [64]),
    "three rows of one sequence": (Shape(heads=4, kv_heads=2), [126, 127, 128]),
    "twelve heads for two": (Shape(heads=12, kv_heads=2, dim=32, rotary=32), [70]),
    "width of the 35B model": (Shape(heads=8, kv_heads=1, dim=256, rotary=64, layers=1, layer=0), [130]),
    "shorter than medium": (Shape(medium=300, long=1000), [298]),
    "medium": (Shape(medium=300, long=1000), [299]),
    "medium, two splits and an odd end": (Shape(medium=300, long=1000), [420]),
    "shorter than long": (Shape(heads=2, dim=32, medium=300, long=1100), [1098]),
    "long": (Shape(heads=2, dim=32, medium=300, long=1100), [1099]),
}


@pytest.mark.parametrize("cached", ["bfloat", "float"])
@pytest.mark.parametrize("name", CASES)
def test_attention_is_the_gated_softmax_over_the_cache(
    sim: Any, kernels: Any, rng: Any, name: str, cached: str
) -> None:
    s, places = CASES[name]
    positions = np.array(places)
    cache = Cache.random(rng, s, [positions.max() + 1], ACTIVATIONS[cached][0])
    projected = rows_of(rng, s, len(places), np.float32)
    sequences = np.zeros(len(places), int)
    alone = (f"LILY_CACHED={cached}", f"LILY_HEAD_DIM={s.dim}")  # else float is built for 64 and 256 only
    library = kernels("attention", "float", *(alone if cached == "float" and s.dim == 32 else ()))
    found = on_every_seed(
        sim, lambda: attend(sim, library, s, cache, projected, positions, sequences, pack=4)
    )
    wanted = reference(s, cache, projected, positions, sequences)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max() + 2e-6)


@pytest.mark.parametrize("pack", [1, 8])
def test_packing_heads_changes_no_byte(sim: Any, kernels: Any, rng: Any, pack: int) -> None:
    s = Shape(heads=12, kv_heads=2, medium=100)
    cache = Cache.random(rng, s, [200], BF16)
    projected = rows_of(rng, s, 1, BF16)
    arguments = (kernels("attention"), s, cache, projected, np.array([180]), np.array([0]))
    packed = attend(sim, *arguments, pack=4)
    assert attend(sim, *arguments, pack=pack).tobytes() == packed.tobytes()


def test_rows_of_several_sequences_have_the_bits_they_have_alone(sim: Any, kernels: Any, rng: Any) -> None:
    """The rows' lengths lie in all three ranges of split sizes."""
    s = Shape(heads=4, kv_heads=2, dim=32, rotary=8, medium=100, long=700)
    cache = Cache.random(rng, s, [40, 800, 300], BF16)
    projected = rows_of(rng, s, 4, BF16)
    positions, sequences = np.array([39, 750, 299, 98]), np.array([0, 1, 2, 1])
    library = kernels("attention")
    together = attend(sim, library, s, cache, projected, positions, sequences, pack=4)
    wanted = reference(s, cache, projected, positions, sequences)
    np.testing.assert_allclose(together.astype(np.float64), wanted, rtol=2.0**-8, atol=1e-5)
    for row in range(4):
        one = slice(row, row + 1)
        alone = attend(sim, library, s, cache, projected[one], positions[one], sequences[one], pack=4)
        assert alone.tobytes() == together[one].tobytes()


def test_large_scores_overflow_nothing(sim: Any, kernels: Any, rng: Any) -> None:
    s = Shape(heads=4)
    cache = Cache.random(rng, s, [150], BF16)
    projected = rows_of(rng, s, 1, np.float32) * 300
    found = attend(sim, kernels("attention", "float"), s, cache, projected, np.array([149]), np.array([0]), 4)
    wanted = reference(s, cache, projected, np.array([149]), np.array([0]))
    np.testing.assert_allclose(found, wanted, atol=2e-3)


def test_a_cached_row_is_read_once_per_packed_heads(sim: Any, kernels: Any, rng: Any) -> None:
    """Distinct bytes are the cache's once; those loaded are once per pack of query heads."""
    s = Shape(heads=8, kv_heads=1, dim=256, rotary=64, layers=1, layer=0)
    cache = Cache.random(rng, s, [192], BF16)
    projected = rows_of(rng, s, 1, BF16)
    needed = 192 * 2 * 256 * 2
    for pack, reads in ((4, 2), (8, 1), (1, 8)):
        sim.log_dispatches()
        attend(sim, kernels("attention"), s, cache, projected, np.array([191]), np.array([0]), pack)
        work = sim.dispatches()[0]
        assert needed <= work.bytes_read <= needed + projected.nbytes + 64
        assert reads * needed <= work.bytes_loaded <= 1.1 * reads * needed


@pytest.mark.parametrize(
    ("s", "position"),
    [
        (Shape(heads=4, kv_heads=2, dim=64, rotary=16), 3),
        (Shape(heads=3, kv_heads=3, dim=32, rotary=32), 511),
        (Shape(heads=8, kv_heads=1, dim=256, rotary=64), 262_140),
        (Shape(heads=2, kv_heads=1, dim=128, rotary=24), 512),
    ],
)
@pytest.mark.parametrize("activation", ["bfloat", "float"])
def test_rotary_append_norms_rotates_and_stores(
    sim: Any, kernels: Any, rng: Any, s: Shape, position: int, activation: str
) -> None:
    """Two rows; the second is the next position of another sequence."""
    dtype, stored = ACTIVATIONS[activation]
    positions, sequences = np.array([position, position + 1], np.uint32), np.array([1, 0], np.uint32)
    projected = rows_of(rng, s, 2, dtype)
    norms = rng.uniform(0.5, 1.5, (2, s.dim)).astype(np.float32)
    coarse, fine = tables(s.rotary, position + 1)
    page = position // PAGE + 2
    table = np.zeros((2, page), np.uint32)  # only the touched pages exist
    table[1, position // PAGE], table[0, (position + 1) // PAGE] = 2, 1

    def compute() -> Array:
        rows = sim.buffer(projected, "projected")
        pool = sim.buffer(np.zeros((3, s.page_stride), BF16), "cache")
        arguments = {0: rows, 1: sim.buffer(norms[0]), 2: sim.buffer(norms[1]), 3: sim.buffer(coarse)}
        arguments |= {4: sim.buffer(fine), 5: sim.buffer(positions), 6: sim.buffer(sequences)}
        arguments |= {7: sim.buffer(table), 8: pool, 9: s.structure(page, 1)}
        run(
            sim,
            {
                "library": kernels("attention", activation),
                "kernel": f"rotary_append_bfloat_d{s.dim}",
                "arguments": arguments,
                "groups": (-(-(s.heads + s.kv_heads) // 4), 2),
                "group": 128,
            },
        )
        joined = [rows.array(np.uint8).copy(), pool.array(np.uint8).copy()]
        return np.concatenate(joined)

    found = on_every_seed(sim, compute)
    rows = found[: projected.nbytes].view(dtype).reshape(2, s.stride)
    pool = found[projected.nbytes :].view(BF16).reshape(3, s.layers, s.kv_heads, 2, -1)
    queries, wide = 2 * s.dim * s.heads, projected.astype(np.float64)
    for row, number in ((0, 2), (1, 1)):
        heads = wide[row, :queries].reshape(s.heads, 2, s.dim)
        keys = wide[row, queries : queries + s.dim * s.kv_heads].reshape(s.kv_heads, s.dim)
        values = projected[row, queries + s.dim * s.kv_heads :].reshape(s.kv_heads, s.dim)
        slot = int(positions[row]) % PAGE
        layer = pool[number, s.layer]

        def rotated(x: Array, norm: Array, row: int = row) -> Array:
            x = rms(x) * norm
            a = angles(positions[row : row + 1], s.rotary)[0]
            low, high = x[:, : s.rotary // 2], x[:, s.rotary // 2 : s.rotary]
            turned = [low * np.cos(a) - high * np.sin(a), high * np.cos(a) + low * np.sin(a)]
            return np.concatenate([*turned, x[:, s.rotary :]], 1)

        out = rows[row, :queries].reshape(s.heads, 2, s.dim)
        np.testing.assert_allclose(
            out[:, 0].astype(np.float64), rotated(heads[:, 0], norms[0]), rtol=stored, atol=3e-6
        )
        assert (out[:, 1] == projected[row, :queries].reshape(s.heads, 2, s.dim)[:, 1]).all()
        np.testing.assert_allclose(
            layer[:, 0].reshape(s.kv_heads, s.dim, PAGE)[:, :, slot].astype(np.float64),
            rotated(keys, norms[1]),
            rtol=2.0**-8,
            atol=3e-6,
        )
        cached = layer[:, 1].reshape(s.kv_heads, PAGE, s.dim)[:, slot]
        assert (cached == values.astype(BF16)).all()
        layer[:] = 0
    assert (pool == 0).all(), "wrote beyond its slot's layer"
