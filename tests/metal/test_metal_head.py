"""Embedding, head and greedy choice: exact rows, every token's logit, the lowest token among equals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from metal_reference import EPS, Array, Weights, assert_near, on_every_seed, quantised, rms, run, structure


def embed(sim: Any, library: Any, table: Weights, tokens: Array) -> Array:
    """Rows of the table."""
    rows, hidden = len(tokens), table.dense.shape[1]
    residual = sim.buffer(4 * rows * hidden, "residual")
    arguments = table.arguments(sim) | {3: sim.buffer(tokens, "tokens"), 4: residual}
    arguments[5] = structure(rows, hidden, table.group_shift)
    run(
        sim,
        {
            "library": library,
            "kernel": f"embed_{table.format}",
            "arguments": arguments,
            "groups": (-(-hidden // 1024), rows),
            "group": (32, 1),
        },
    )
    return residual.array(np.float32, (rows, hidden)).copy()


@pytest.mark.parametrize(
    ("bits", "group", "hidden"), [(4, 64, 192), (4, 32, 2080), (8, 128, 128), (8, 32, 96), (16, 32, 64)]
)
def test_embed_is_the_row_of_the_table(
    sim: Any, kernels: Any, rng: Any, bits: int, group: int, hidden: int
) -> None:
    table = quantised(rng, 50, hidden, bits, group)
    tokens = np.array([49, 0, 7, 7, 13], np.uint32)
    found = on_every_seed(sim, lambda: embed(sim, kernels("head"), table, tokens))
    # scale * code is exact in fp32 (8 and at most 8 bits), so only the sum is rounded.
    assert (found == table.dense[tokens].astype(np.float32)).all()


def head(
    sim: Any,
    library: Any,
    w: Weights,
    x: Array,
    gain: Array,
    sources: Array,
    want_logits: bool = True,
    per_group: int | None = None,  # weight rows of a threadgroup
) -> tuple[Array, Array, Array, Array]:
    """Logits, hidden rows, tokens and positions after the two launches."""
    rows, (outputs, cols) = len(sources), w.dense.shape
    m = next(m for m in (1, 2, 4, 8) if m >= rows)
    groups = -(-outputs // (per_group or 16 * min(4, 16 // m)))
    logits = sim.buffer(np.full((rows, outputs), 7, np.float32), "logits")
    hidden = sim.buffer(np.full(x.shape, 7, np.float32), "hidden")
    best = sim.buffer(8 * rows * groups, "best")
    tokens, keys = sim.buffer(4 * rows, "tokens"), sim.buffer(4 * rows, "keys")
    positions = sim.buffer(np.arange(rows, dtype=np.uint32), "positions")
    arguments = w.arguments(sim) | {3: sim.buffer(x, "input"), 4: sim.buffer(gain, "gain")}
    arguments |= {5: sim.buffer(sources.astype(np.uint32), "sources"), 6: logits, 7: hidden, 8: best}
    arguments[9] = structure(rows, cols, outputs, w.group_shift, EPS, int(want_logits), groups)
    choice = {0: best, 1: tokens, 2: keys, 3: positions, 4: np.uint32(groups), 5: np.uint32(1)}
    first = {"kernel": f"head_{w.format}_m{m}", "arguments": arguments, "groups": groups}
    run(
        sim,
        {"library": library, "group": 256} | first,
        {"library": library, "kernel": "argmax", "arguments": choice, "groups": rows, "group": 256},
    )
    return (
        logits.array(np.float32, (rows, outputs)).copy(),
        hidden.array(np.float32, x.shape).copy(),
        tokens.array(np.uint32).copy(),
        positions.array(np.uint32).copy(),
    )


@pytest.mark.parametrize(
    ("bits", "rows", "outputs", "cols"),
    [(4, 1, 333, 96), (4, 3, 129, 1056), (8, 2, 70, 64), (4, 8, 67, 544), (16, 1, 65, 64)],
)
def test_head_gives_logits_and_their_best_token(
    sim: Any, kernels: Any, rng: Any, bits: int, rows: int, outputs: int, cols: int
) -> None:
    weights = quantised(rng, outputs, cols, bits, 32)
    x = rng.normal(0, 2, (rows + 1, cols)).astype(np.float32)
    gain = rng.uniform(0.5, 1.5, cols).astype(np.float32)
    sources = np.arange(rows)[::-1] + 1  # the first row's logits are not wanted
    library = kernels("head")
    found = on_every_seed(sim, lambda: head(sim, library, weights, x, gain, sources)[0])
    _, hidden, tokens, positions = head(sim, library, weights, x, gain, sources)
    normed = rms(x[sources]) * gain
    assert_near(found, normed @ weights.dense.T, np.abs(normed) @ np.abs(weights.dense.T), 2.0**-22)
    np.testing.assert_allclose(hidden[sources], normed, rtol=2e-6)
    assert (hidden[0] == 7).all()
    assert tokens.tolist() == found.argmax(1).tolist()
    assert positions.tolist() == [i + 1 for i in range(rows)]


def test_logits_are_written_only_if_wanted(sim: Any, kernels: Any, rng: Any) -> None:
    weights = quantised(rng, 90, 64, 4, 32)
    x, gain = rng.normal(0, 2, (2, 64)).astype(np.float32), np.ones(64, np.float32)
    silent = head(sim, kernels("head"), weights, x, gain, np.arange(2), want_logits=False)
    spoken = head(sim, kernels("head"), weights, x, gain, np.arange(2))
    assert (silent[0] == 7).all()
    assert silent[2].tolist() == spoken[2].tolist()


@pytest.mark.parametrize("best", [[5, 300], [63, 64], [299, 300], [0, 332], [5, 20]])
def test_the_lowest_of_equal_tokens_wins(sim: Any, kernels: Any, rng: Any, best: list[int]) -> None:
    """Equal weight rows give equal logits, in one simdgroup, in two, or in two threadgroups."""
    weights = quantised(rng, 333, 64, 16)
    x = np.ones((1, 64), np.float32)
    weights.codes[best] = 1
    assert head(sim, kernels("head"), weights, x, x[0], np.arange(1))[2].tolist() == [best[0]]


@pytest.mark.parametrize("places", [[3, 259, 515], [599], [40, 41], [0, 256]])
def test_argmax_takes_the_lowest_token_of_many_partials(
    sim: Any, kernels: Any, rng: Any, places: list[int]
) -> None:
    """More partials than threads; tokens needn't ascend with the threadgroups."""
    partials = np.stack([rng.integers(1, 1000, (2, 600)), rng.permutation(1200).reshape(2, 600)], -1)
    partials[0, places, 0] = 5000
    best = sim.buffer(partials.astype(np.uint32), "best")
    positions = sim.buffer(np.array([7, 8], np.uint32))

    def compute() -> Array:
        tokens, keys = sim.buffer(8, "tokens"), sim.buffer(8, "keys")
        arguments = {0: best, 1: tokens, 2: keys, 3: positions, 4: np.uint32(600), 5: np.uint32(0)}
        run(
            sim,
            {
                "library": kernels("head"),
                "kernel": "argmax",
                "arguments": arguments,
                "groups": 2,
                "group": 256,
            },
        )
        return np.stack([tokens.array(np.uint32), keys.array(np.uint32)])

    found = on_every_seed(sim, compute)
    for row in range(2):
        key = partials[row, :, 0].max()
        token = partials[row, partials[row, :, 0] == key, 1].min()
        assert found[:, row].tolist() == [token, key]
    assert positions.array(np.uint32).tolist() == [7, 8]


def test_a_nan_logit_is_the_choice(sim: Any, kernels: Any, rng: Any) -> None:
    weights = quantised(rng, 100, 64, 16)
    weights.codes[77, 3] = np.nan
    x = np.ones((1, 64), np.float32)
    assert head(sim, kernels("head"), weights, x, x[0], np.arange(1))[2].tolist() == [77]


def test_a_row_has_the_same_bits_whatever_the_rows_beside_it(sim: Any, kernels: Any, rng: Any) -> None:
    weights = quantised(rng, 50, 1152, 4)
    x = rng.normal(0, 2, (8, 1152)).astype(np.float32)
    gain = rng.uniform(0.5, 1.5, 1152).astype(np.float32)
    together = head(sim, kernels("head"), weights, x, gain, np.arange(8))[0]
    for count in (1, 2, 3, 5):
        few = head(sim, kernels("head"), weights, x, gain, np.arange(count))[0]
        assert few.tobytes() == together[:count].tobytes()
