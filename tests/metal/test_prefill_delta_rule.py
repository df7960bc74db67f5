"""Gated DeltaNet over many rows: preparation, the scan and its blockwise form, and the gated norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from metal_reference import ACTIVATIONS, EPS, Array, launched, on_every_seed, rms, sigmoid, silu, structure
from test_metal_delta_rule import SHAPES as FEW_ROWS
from test_metal_delta_rule import UNIT_EPS, Layer, Shape, reference, rows_of
from test_metal_delta_rule import step as few_rows_step

SHAPES = FEW_ROWS | {"three taps, narrow": Shape(key_heads=1, value_heads=5, value_dim=16, conv=3)}
FORMS = ("scan", "blocks")


def structure_of(s: Shape, rows: int, eps: float = UNIT_EPS) -> bytes:
    """DeltaRowsShape."""
    return structure(rows, s.key_heads, s.value_heads, s.value_dim, s.channels, s.stride, eps)


def prepare(sim: Any, library: Any, layer: Layer, projected: Array) -> tuple[Array, Array, Array]:
    """(mixed [rows, channels], gates [rows, 2 value_heads + key_heads], history)."""
    s, rows, dtype = layer.shape, len(projected), projected.dtype
    gate_width = 2 * s.value_heads + s.key_heads
    history = sim.buffer(layer.history, "history")
    mixed = sim.buffer(np.zeros((rows, s.channels), dtype), "mixed")
    gates = sim.buffer(4 * rows * gate_width, "gates")
    arguments = {0: sim.buffer(projected, "projected"), 4: history, 5: mixed, 6: gates}
    arguments |= {
        i + 1: sim.buffer(array) for i, array in enumerate([layer.conv, layer.a_log, layer.dt_bias])
    }
    arguments |= {7: sim.buffer(np.array([layer.position], np.uint32)), 8: structure_of(s, rows)}
    units = s.key_heads + -(-s.values // s.key_dim) + 1
    with sim.encoder() as encoder:
        launched(
            encoder,
            library=library,
            kernel=f"delta_prepare_k{s.key_dim // 32}_c{s.conv}",
            arguments=arguments,
            groups=(-(-units // 4), -(-rows // 32)),
            group=128,
        )
    assert sim.diagnostics() == []
    return (
        mixed.array(dtype, (rows, s.channels)).copy(),
        gates.array(np.float32, (rows, gate_width)).copy(),
        history.array(dtype, layer.history.shape).copy(),
    )


def scan(
    sim: Any, library: Any, form: str, s: Shape, mixed: Array, gates: Array, before: Array
) -> tuple[Array, Array]:
    """(o [rows, value_heads, value_dim], state)."""
    rows, dtype = len(mixed), mixed.dtype
    state, out = sim.buffer(before, "state"), sim.buffer(np.zeros((rows, s.values), dtype), "out")
    arguments = {0: sim.buffer(mixed, "mixed"), 1: sim.buffer(gates, "gates"), 2: state, 3: out}
    with sim.encoder() as encoder:
        launched(
            encoder,
            library=library,
            kernel=f"delta_{form}_k{s.key_dim // 32}",
            arguments=arguments | {4: structure_of(s, rows)},
            groups=(-(-s.value_dim // (16 if form == "scan" else 32)), s.value_heads),
            group=128,
        )
    assert sim.diagnostics() == []
    return (
        out.array(dtype, (rows, s.value_heads, s.value_dim)).copy(),
        state.array(np.float32, before.shape).copy(),
    )


def gated_norm(sim: Any, library: Any, layer: Layer, o: Array, projected: Array) -> Array:
    s = layer.shape
    out = sim.buffer(o, "out")
    arguments = {0: out, 1: sim.buffer(projected), 2: sim.buffer(layer.norm), 3: structure_of(s, len(o), EPS)}
    with sim.encoder() as encoder:
        groups = (-(-s.value_heads // 4), len(o))
        encoder.dispatch(library, "gated_norm_rows", arguments, groups=groups, group=128)
    assert sim.diagnostics() == []
    return np.asarray(out.array(o.dtype, o.shape).copy())


def chunk(sim: Any, library: Any, form: str, layer: Layer, projected: Array) -> Array:
    """Output of a chunk; the layer's state, history and position move on."""
    mixed, gates, layer.history = prepare(sim, library, layer, projected)
    o, layer.state = scan(sim, library, form, layer.shape, mixed, gates, layer.state)
    layer.position += len(projected)
    return gated_norm(sim, library, layer, o, projected)


def scan_reference(s: Shape, mixed: Array, gates: Array, before: Array) -> tuple[Array, Array]:
    """Token by token in float64, from the stored q, k, v and gates."""
    state, x = before.astype(np.float64), mixed.astype(np.float64)
    keys = s.key_heads * s.key_dim
    q, k = (part.reshape(-1, s.key_heads, s.key_dim) for part in (x[:, :keys], x[:, keys : 2 * keys]))
    v = x[:, 2 * keys :].reshape(-1, s.value_heads, s.value_dim)
    out = np.zeros(v.shape)
    for row in range(len(x)):
        for h in range(s.value_heads):
            key = h // (s.value_heads // s.key_heads)
            state[h] *= gates[row, h]
            delta = gates[row, s.value_heads + h].astype(np.float64) * (v[row, h] - state[h] @ k[row, key])
            state[h] += np.outer(delta, k[row, key])
            out[row, h] = state[h] @ q[row, key]
    return out, state


@pytest.mark.parametrize("activation", ["bfloat", "float"])
@pytest.mark.parametrize(("rows", "position"), [(1, 0), (15, 1), (17, 2), (32, 30), (65, 100)])
@pytest.mark.parametrize("name", SHAPES)
def test_preparation_convolves_normalises_and_remembers(
    sim: Any, kernels: Any, rng: Any, name: str, rows: int, position: int, activation: str
) -> None:
    dtype, stored = ACTIVATIONS[activation]
    s = SHAPES[name]
    layer = Layer.random(rng, s, position, dtype)
    projected = rows_of(rng, s, rows, dtype)
    mixed, gates, history = prepare(sim, kernels("delta_rule_scan", activation), layer, projected)
    wide = projected.astype(np.float64)
    past = [layer.inputs_before(r) for r in range(1 - s.conv, 0)]
    inputs = np.concatenate([np.stack(past), wide[:, : s.channels]])
    wanted = silu(sum(inputs[t : t + rows] * layer.conv[t].astype(np.float64) for t in range(s.conv)))
    keys = s.key_heads * s.key_dim
    for begin, scale in ((0, 1 / np.sqrt(s.key_dim)), (keys, 1.0)):
        heads = wanted[:, begin : begin + keys].reshape(rows, s.key_heads, s.key_dim)
        heads *= scale / np.sqrt((heads * heads).sum(-1, keepdims=True) + UNIT_EPS)
    np.testing.assert_allclose(mixed.astype(np.float64), wanted, rtol=stored, atol=3e-6)
    b, a = np.split(wide[:, s.channels + s.values :], 2, axis=1)
    decay = np.exp(-np.exp(layer.a_log.astype(np.float64)) * np.logaddexp(0, a + layer.dt_bias))
    np.testing.assert_allclose(gates[:, : s.value_heads], decay, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gates[:, s.value_heads : 2 * s.value_heads], sigmoid(b), rtol=1e-5)
    q, k = (mixed[:, i * keys : (i + 1) * keys].reshape(rows, -1, s.key_dim) for i in (0, 1))
    overlap = (q.astype(np.float64) * k.astype(np.float64)).sum(-1)
    np.testing.assert_allclose(gates[:, 2 * s.value_heads :], overlap, atol=1e-6)
    remembered = layer.history.copy()
    for row in range(max(0, rows - 16), rows):
        remembered[(position + row) % 16] = projected[row, : s.channels]
    assert history.tobytes() == remembered.tobytes()


@pytest.mark.parametrize("activation", ["bfloat", "float"])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 50])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_recurrence_from_stored_rows(
    sim: Any, kernels: Any, rng: Any, name: str, form: str, rows: int, activation: str
) -> None:
    dtype, stored = ACTIVATIONS[activation]
    s, library = SHAPES[name], kernels("delta_rule_scan", activation)
    layer = Layer.random(rng, s, 40, dtype)
    mixed, gates, _ = prepare(sim, library, layer, rows_of(rng, s, rows, dtype))
    found: dict[str, Any] = {}

    def compute() -> Array:
        found["parts"] = scan(sim, library, form, s, mixed, gates, layer.state)
        return np.concatenate([part.reshape(-1).view(np.uint8) for part in found["parts"]])

    on_every_seed(sim, compute)
    wanted = scan_reference(s, mixed, gates, layer.state)
    np.testing.assert_allclose(found["parts"][0].astype(np.float64), wanted[0], rtol=stored, atol=5e-6)
    np.testing.assert_allclose(found["parts"][1], wanted[1], atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_keys_that_repeat_and_states_that_never_fade(sim: Any, kernels: Any, rng: Any, form: str) -> None:
    """The hardest inverse: equal keys of length one, beta 1, decay 1; then decays that underflow to 0."""
    s = SHAPES["small"]
    mixed = rng.normal(0, 1, (32, s.channels)).astype(np.float32)
    keys = s.key_heads * s.key_dim
    mixed[:, keys : 2 * keys] = np.float32(1 / np.sqrt(s.key_dim))
    gates = np.ones((32, 2 * s.value_heads + s.key_heads), np.float32)
    gates[20:, : s.value_heads] = 0
    overlap = (mixed[:, :keys] * mixed[:, keys : 2 * keys]).reshape(32, s.key_heads, s.key_dim).sum(-1)
    gates[:, 2 * s.value_heads :] = overlap
    before = rng.normal(0, 0.3, (s.value_heads, s.value_dim, s.key_dim)).astype(np.float32)
    o, state = scan(sim, kernels("delta_rule_scan", "float"), form, s, mixed, gates, before)
    wanted = scan_reference(s, mixed, gates, before)
    np.testing.assert_allclose(o, wanted[0], atol=3e-5)
    np.testing.assert_allclose(state, wanted[1], atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["small", "heads of the 35B model"])
def test_a_chunk_is_the_float64_model(sim: Any, kernels: Any, rng: Any, name: str, form: str) -> None:
    s = SHAPES[name]
    layer = Layer.random(rng, s, 9, np.float32)
    projected = rows_of(rng, s, 40, np.float32)
    before, squares, state = reference(layer, projected)
    wanted = before / np.sqrt(squares[..., None] / s.value_dim + EPS)
    found = chunk(sim, kernels("delta_rule_scan", "float"), form, layer, projected)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(layer.state, state, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_chunks_of_any_size_have_the_same_bits(sim: Any, kernels: Any, rng: Any, form: str) -> None:
    dtype = ACTIVATIONS["bfloat"][0]
    s, library = SHAPES["small"], kernels("delta_rule_scan")
    projected = rows_of(rng, s, 80, dtype)
    results = []
    cuts = ([80], [16, 64], [32, 48]) if form == "blocks" else ([80], [1, 79], [33, 31, 16], [64, 16])
    for sizes in cuts:
        layer = Layer.random(np.random.default_rng(5), s, 3, dtype)
        parts = np.split(projected, np.cumsum(sizes)[:-1])
        out = np.concatenate([chunk(sim, library, form, layer, part) for part in parts])
        results.append((out.tobytes(), layer.state.tobytes(), layer.history.tobytes()))
    assert len(set(results)) == 1


def test_decode_goes_on_where_a_chunk_ends(sim: Any, kernels: Any, rng: Any) -> None:
    """State and ring are those of delta_rule.metal, which takes the rows after the chunk."""
    s = SHAPES["small"]
    layer = Layer.random(rng, s, 4, np.float32)
    projected = rows_of(rng, s, 38, np.float32)
    wanted = reference(layer, projected)
    chunk(sim, kernels("delta_rule_scan", "float"), "scan", layer, projected[:35])
    out, _, state, _ = few_rows_step(sim, kernels("delta_rule", "float"), layer, projected[35:], 8)
    np.testing.assert_allclose(out, wanted[0][35:], atol=2e-5)
    np.testing.assert_allclose(state, wanted[2], atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_gated_norm_of_heads(sim: Any, kernels: Any, rng: Any, name: str) -> None:
    dtype, stored = ACTIVATIONS["bfloat"]
    s = SHAPES[name]
    layer = Layer.random(rng, s, 0, dtype)
    projected = rows_of(rng, s, 3, dtype)
    o = rng.normal(0, 0.1, (3, s.value_heads, s.value_dim)).astype(dtype)
    z = projected[:, s.channels : s.channels + s.values].reshape(o.shape)
    found = gated_norm(sim, kernels("delta_rule_scan"), layer, o, projected)
    np.testing.assert_allclose(
        found.astype(np.float64), rms(o) * layer.norm * silu(z), rtol=stored, atol=1e-6
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_state_is_read_once_and_written_once_per_chunk(
    sim: Any, kernels: Any, rng: Any, form: str
) -> None:
    s, dtype = SHAPES["heads of the 35B model"], ACTIVATIONS["bfloat"][0]
    layer = Layer.random(rng, s, 0, dtype)
    library = kernels("delta_rule_scan")
    mixed, gates, _ = prepare(sim, library, layer, rows_of(rng, s, 48, dtype))
    sim.log_dispatches()
    scan(sim, library, form, s, mixed, gates, layer.state)
    (work,) = sim.dispatches()
    out = 48 * s.values * 2
    assert work.bytes_written == work.bytes_stored == layer.state.nbytes + out
    assert work.bytes_read <= layer.state.nbytes + mixed.nbytes + gates.nbytes + 64
