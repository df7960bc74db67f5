"""Gated DeltaNet: output, state and remembered inputs against a float64 scan, token by token or in rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from metal_reference import ACTIVATIONS, Array, on_every_seed, run, sigmoid, silu, structure

UNIT_EPS = 1e-6
HISTORY = 16


@dataclass(frozen=True)
class Shape:
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 32
    conv: int = 4

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def stride(self) -> int:
        return self.channels + self.values + 2 * self.value_heads

    @property
    def slices(self) -> int:
        return self.value_dim // 16


SHAPES = {
    "small": Shape(),
    "one key head, wide values": Shape(key_heads=1, value_heads=3, key_dim=64, value_dim=48),
    "heads of the 35B model": Shape(key_heads=1, value_heads=2, key_dim=128, value_dim=128),
    "two taps": Shape(key_heads=2, value_heads=2, value_dim=16, conv=2),
}


@dataclass
class Layer:
    """Parameters and the state before position `position`."""

    shape: Shape
    conv: Array  # [conv, channels]
    a_log: Array
    dt_bias: Array
    norm: Array
    history: Array  # [16, channels], position p at p % 16
    state: Array  # [value_heads, value_dim, key_dim]
    position: int

    @staticmethod
    def random(rng: np.random.Generator, s: Shape, position: int, dtype: Any) -> Layer:
        state = rng.normal(0, 0.3, (s.value_heads, s.value_dim, s.key_dim)).astype(np.float32)
        return Layer(
            s,
            rng.normal(0, 0.5, (s.conv, s.channels)).astype(np.float32),
            np.log(rng.uniform(0.01, 16, s.value_heads)).astype(np.float32),
            rng.normal(0, 2, s.value_heads).astype(np.float32),
            rng.uniform(0.5, 1.5, s.value_dim).astype(np.float32),
            rng.normal(0, 1, (HISTORY, s.channels)).astype(dtype),
            state if position else np.zeros_like(state),
            position,
        )

    def inputs_before(self, row: int) -> Array:
        """What the convolution remembers of position + row, a negative row; zero before the beginning."""
        place = self.position + row
        return self.history[place % HISTORY].astype(np.float64) * (place >= 0)


def reference(layer: Layer, projected: Array) -> tuple[Array, Array, Array]:
    """(out before the division, squares per head, state) in float64."""
    s, wide = layer.shape, projected.astype(np.float64)
    state = layer.state.astype(np.float64)
    out, squares = np.zeros((len(wide), s.value_heads, s.value_dim)), np.zeros((len(wide), s.value_heads))
    keys, group = s.key_heads * s.key_dim, s.value_heads // s.key_heads
    for row, x in enumerate(wide):
        past = range(row - s.conv + 1, row + 1)
        inputs = np.stack([wide[r, : s.channels] if r >= 0 else layer.inputs_before(r) for r in past])
        mixed = silu((inputs * layer.conv).sum(0))
        q, k = (part.reshape(s.key_heads, s.key_dim) for part in np.split(mixed[: 2 * keys], 2))
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + UNIT_EPS) / np.sqrt(s.key_dim)
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + UNIT_EPS)
        v = mixed[2 * keys :].reshape(s.value_heads, s.value_dim)
        z, b, a = np.split(x[s.channels :], [s.values, s.values + s.value_heads])
        decay = np.exp(-np.exp(layer.a_log.astype(np.float64)) * np.logaddexp(0, a + layer.dt_bias))
        for h in range(s.value_heads):
            state[h] *= decay[h]
            delta = sigmoid(b[h]) * (v[h] - state[h] @ k[h // group])
            state[h] += np.outer(delta, k[h // group])
            o = state[h] @ q[h // group]
            squares[row, h] = (o * o).sum()
            out[row, h] = o * layer.norm * silu(z.reshape(s.value_heads, s.value_dim)[h])
    return out, squares, state


def step(
    sim: Any, library: Any, layer: Layer, projected: Array, room: int, apart: bool = False
) -> tuple[Array, Array, Array, Array]:
    """(out, squares by slice, state, history) after one launch over the rows; `apart`: into another state."""
    s, rows, dtype = layer.shape, len(projected), projected.dtype
    state, history = sim.buffer(layer.state, "state"), sim.buffer(layer.history, "history")
    out = sim.buffer(np.zeros((rows, s.values), dtype), "out")
    squares = sim.buffer(4 * rows * s.value_heads * s.slices, "squares")
    arrays = [layer.conv, layer.a_log, layer.dt_bias, layer.norm]
    arguments = {0: sim.buffer(projected, "projected"), 5: history, 6: state, 7: out, 8: squares}
    arguments |= {i + 1: sim.buffer(array) for i, array in enumerate(arrays)}
    arguments[9] = sim.buffer(np.array([layer.position], np.uint32), "positions")
    arguments[11] = sim.buffer(4 * layer.state.size, "next state") if apart else state
    arguments[10] = structure(rows, s.key_heads, s.value_heads, s.value_dim, s.conv, s.stride, UNIT_EPS)
    run(
        sim,
        {
            "library": library,
            "kernel": f"delta_rule_k{s.key_dim // 32}_m{room}",
            "arguments": arguments,
            "groups": (s.slices, s.value_heads),
            "group": 128,
        },
    )
    if apart:
        assert state.array(np.float32, layer.state.shape).tobytes() == layer.state.tobytes()
    return (
        out.array(dtype, (rows, s.value_heads, s.value_dim)).copy(),
        squares.array(np.float32, (rows, s.value_heads, s.slices)).copy(),
        arguments[11].array(np.float32, layer.state.shape).copy(),
        history.array(dtype, layer.history.shape).copy(),
    )


def rows_of(rng: np.random.Generator, s: Shape, rows: int, dtype: Any) -> Array:
    return rng.normal(0, 1.5, (rows, s.stride)).astype(dtype)


@pytest.mark.parametrize("activation", ["bfloat", "float"])
@pytest.mark.parametrize(("rows", "position"), [(1, 0), (1, 37), (3, 1), (8, 14)])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_advance_state_and_history(
    sim: Any, kernels: Any, rng: Any, name: str, rows: int, position: int, activation: str
) -> None:
    dtype, stored = ACTIVATIONS[activation]
    s = SHAPES[name]
    layer = Layer.random(rng, s, position, dtype)
    projected = rows_of(rng, s, rows, dtype)
    library, room = kernels("delta_rule", activation), 1 if rows == 1 else 8
    found = {}

    def compute() -> Array:
        found["parts"] = step(sim, library, layer, projected, room)
        return np.concatenate([part.reshape(-1).view(np.uint8) for part in found["parts"]])

    on_every_seed(sim, compute)
    out, squares, state, history = found["parts"]
    wanted = reference(layer, projected)
    np.testing.assert_allclose(out.astype(np.float64), wanted[0], rtol=stored, atol=2e-5)
    np.testing.assert_allclose(squares.sum(-1), wanted[1], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(state, wanted[2], atol=1e-5)
    remembered = layer.history.copy()
    for row in range(rows):
        remembered[(position + row) % HISTORY] = projected[row, : s.channels]
    assert history.tobytes() == remembered.tobytes()


@pytest.mark.parametrize("activation", ["bfloat", "float"])
def test_rows_together_have_the_bits_of_rows_one_by_one(
    sim: Any, kernels: Any, rng: Any, activation: str
) -> None:
    s, dtype = SHAPES["heads of the 35B model"], ACTIVATIONS[activation][0]
    layer = Layer.random(rng, s, 5, dtype)
    projected = rows_of(rng, s, 6, dtype)
    library = kernels("delta_rule", activation)
    together = step(sim, library, layer, projected, 8)
    outs = []
    for row in range(6):
        out, _, state, history = step(sim, library, layer, projected[row : row + 1], 1)
        layer.state, layer.history, layer.position = state, history, layer.position + 1
        outs.append(out)
    assert np.concatenate(outs).tobytes() == together[0].tobytes()
    assert layer.state.tobytes() == together[2].tobytes()
    assert layer.history.tobytes() == together[3].tobytes()


def test_extreme_gates_stay_finite(sim: Any, kernels: Any, rng: Any) -> None:
    s = SHAPES["small"]
    layer = Layer.random(rng, s, 3, np.float32)
    projected = rows_of(rng, s, 2, np.float32)
    projected[0, -2 * s.value_heads :] = 200
    projected[1, -2 * s.value_heads :] = -200
    out, _, state, _ = step(sim, kernels("delta_rule", "float"), layer, projected, 8)
    wanted = reference(layer, projected)
    np.testing.assert_allclose(out, wanted[0], atol=2e-5)
    np.testing.assert_allclose(state, wanted[2], atol=1e-5)


def test_a_step_into_another_state_leaves_the_one_before(sim: Any, kernels: Any, rng: Any) -> None:
    s = SHAPES["small"]
    layer = Layer.random(rng, s, 3, np.float32)
    projected = rows_of(rng, s, 2, np.float32)
    library = kernels("delta_rule", "float")
    found = step(sim, library, layer, projected, 8)
    apart = step(sim, library, layer, projected, 8, apart=True)
    assert [array.tobytes() for array in apart] == [array.tobytes() for array in found]


def test_the_state_is_read_once_and_written_once(sim: Any, kernels: Any, rng: Any) -> None:
    """One key head of the 35B model; what else is read is a hundredth of the state."""
    s = SHAPES["heads of the 35B model"]
    layer = Layer.random(rng, s, 40, ACTIVATIONS["bfloat"][0])
    sim.log_dispatches()
    step(sim, kernels("delta_rule"), layer, rows_of(rng, s, 1, layer.history.dtype), 1)
    (work,) = sim.dispatches()
    assert work.groups == (8, 2, 1)
    once = layer.state.nbytes
    inputs = s.channels * (16 + 2 * 3) + 2 * s.stride  # taps in fp32, remembered inputs, the projected row
    assert once <= work.bytes_read <= once + inputs + 2048
    assert work.bytes_written == once + 2 * (s.channels + s.values) + 4 * s.value_heads * s.slices
    assert work.bytes_loaded + work.bytes_stored < 1.6 * 2 * once
