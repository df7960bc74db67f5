"""The less clever kernels give the results of the formulas too, so that only their cost differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from metal_reference import BF16, METAL, assert_near, quantised, rms, run, silu, structure
from metal_unfused import UnfusedModel
from oracles.shapes import SHAPES
from test_metal_attention import CASES, Cache, attend, reference, rows_of
from test_metal_combine import combine
from test_metal_combine import inputs as combine_inputs
from test_metal_decode import PROMPT
from test_metal_experts import Mixture, Shape, chosen, down, routed, up
from test_metal_head import head
from test_metal_project import capacity, inputs, launch, shape

from metalsim.msl.static_check import check  # isort: skip

FILES = sorted((METAL / "ablation").glob("*.metal"))


def one_row(kernels: Any, file: str, kind: str) -> Any:
    return kernels(f"ablation/one_row_{file}", "float", f"LILY_FORMAT={kind}")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_file_passes_the_static_check_and_states_its_launch(compiler: Any, file: Any) -> None:
    assert check(file, include=[METAL], define=["LILY_ACTIVATION=bfloat"], language="3.1") == []
    text = file.read_text().split("#include")[0]
    assert "Launch:" in text
    assert "Bound" in text


@pytest.mark.parametrize("kind", ["b4", "b8", "b16", "b3"])
def test_one_output_per_simdgroup(sim: Any, kernels: Any, rng: Any, kind: str) -> None:
    """norm_project over two tiles of three rows, norm_gate_up, project_add."""
    library = one_row(kernels, "project", kind)
    weights = quantised(rng, 22, 1152, kind)
    x, gain = inputs(rng, 3, 1152)
    normed = rms(x) * gain
    wanted, size = normed @ weights.dense.T, np.abs(normed) @ np.abs(weights.dense.T)

    def outputs(name: str, arguments: dict[int, Any], count: int, simdgroups: int = 8) -> None:
        launch(
            sim, library, name, weights, arguments,
            rows=3, per_half=1, halves=1, simdgroups=simdgroups, outputs=count,
        )  # fmt: skip

    ends = {3: sim.buffer(x, "input"), 4: sim.buffer(gain, "gain")}
    out = sim.buffer(np.zeros((3, 22), np.float32), "out")
    outputs("norm_project", ends | {5: out, 6: shape(weights, x, 22, 22)}, 22)
    assert_near(out.array(np.float32, (3, 22)), wanted, size, 2.0**-22)
    out = sim.buffer(np.zeros((3, 11), np.float32), "out")
    outputs("norm_gate_up", ends | {5: out, 6: shape(weights, x, 11, 11)}, 11)
    gate, value = np.split(wanted, 2, axis=1)
    magnitude = (np.abs(gate) + size[:, :11]) * (np.abs(value) + size[:, 11:])
    assert_near(out.array(np.float32, (3, 11)), silu(gate) * value, magnitude, 2.0**-22)
    residual = sim.buffer(np.zeros((3, 22), np.float32), "residual")
    outputs("project_add", {3: ends[3], 4: residual, 5: shape(weights, x, 22, 22)}, 22, 4)
    wide = x.astype(np.float64)
    magnitude = np.abs(wide) @ np.abs(weights.dense.T)
    assert_near(residual.array(np.float32, (3, 22)), wide @ weights.dense.T, magnitude, 2.0**-22)


def test_one_output_per_simdgroup_at_the_ends(sim: Any, kernels: Any, rng: Any) -> None:
    weights = quantised(rng, 67, 256, 4)
    x, gain = inputs(rng, 2, 256)
    library = one_row(kernels, "head", "b4")
    logits, _, tokens, _ = head(sim, library, weights, x, gain, np.arange(2), per_group=8)
    normed = rms(x) * gain
    assert_near(logits, normed @ weights.dense.T, np.abs(normed) @ np.abs(weights.dense.T), 2.0**-22)
    assert tokens.tolist() == logits.argmax(1).tolist()
    weights = quantised(rng, 19, 192, 4)
    embedding, hidden, gains = combine_inputs(rng, 2, 96)
    library = one_row(kernels, "combine", "b4")
    found = combine(sim, library, weights, embedding, hidden, gains, np.arange(2), per_group=8)
    joined = np.concatenate([rms(embedding) * gains[0], rms(hidden[:2]) * gains[1]], axis=1)
    assert_near(found, joined @ weights.dense.T, np.abs(joined) @ np.abs(weights.dense.T), 2.0**-22)


def test_one_output_per_simdgroup_in_the_mixture(sim: Any, kernels: Any, rng: Any) -> None:
    s = Shape(experts=6, top_k=2, hidden=96, width=64, shared_width=128)
    mixture = Mixture.random(rng, s)
    library = one_row(kernels, "experts", "b4")
    normed, logits = routed(rng, s, 2, np.float32)
    acts, routing = up(sim, library, mixture, normed, logits, np.float32, columns=8)
    found = down(sim, library, mixture, acts, routing, np.zeros((2, 96), np.float32), outputs=1)
    wanted, magnitude = np.zeros((2, 96)), np.zeros((2, 96))
    for row in range(2):
        experts, _ = chosen(s, logits[row])
        weights = [*routing[row, :2], routing[row, -1]]
        for slot, (expert, weight) in enumerate(zip([*experts, None], weights, strict=True)):
            x, matrix = normed[row].astype(np.float64), mixture.slot(mixture.up, mixture.shared_up, expert)
            gate, value = np.split(matrix @ x, 2)
            size = np.split(np.abs(matrix) @ np.abs(x), 2)
            near_zero = (np.abs(gate) + size[0]) * (np.abs(value) + size[1])
            assert_near(acts[row, slot, : len(gate)], silu(gate) * value, near_zero, 2.0**-22)
            matrix = mixture.slot(mixture.down, mixture.shared_down, expert)
            act = acts[row, slot, : matrix.shape[1]].astype(np.float64)
            wanted[row] += weight * (matrix @ act)
            magnitude[row] += weight * (np.abs(matrix) @ np.abs(act))
    assert_near(found, wanted, magnitude, 2.0**-22)


@pytest.mark.parametrize("name", ["one position", "a page has one position", "width of the 35B model"])
def test_reads_without_order_find_the_same_keys_and_values(
    sim: Any, kernels: Any, rng: Any, name: str
) -> None:
    s, places = CASES[name]
    positions, sequences = np.array(places), np.zeros(len(places), int)
    cache = Cache.random(rng, s, [positions.max() + 1], BF16)
    projected = rows_of(rng, s, len(places), np.float32)
    library = kernels("ablation/strided_attention", "float")
    found = attend(sim, library, s, cache, projected, positions, sequences, pack=4)
    wanted = reference(s, cache, projected, positions, sequences)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max() + 2e-6)


@pytest.mark.parametrize(("kind", "rows"), [("b4", 1), ("b8", 5), ("mxfp4", 2)])
def test_a_projection_alone(sim: Any, kernels: Any, rng: Any, kind: str, rows: int) -> None:
    scale = "uchar" if kind == "mxfp4" else "bfloat"
    library = kernels("ablation/unfused_project", "bfloat", f"LILY_FORMAT={kind}", f"LILY_SCALE={scale}")
    weights = quantised(rng, 37, 96, kind, 32)
    x = rng.normal(0, 1, (rows, 96)).astype(BF16)
    m = capacity(rows)
    for name, dtype, per_group, stored in (
        ("project", BF16, 32, 2.0**-8),
        ("project_float", np.float32, 16 * min(4, 16 // m), 2.0**-22),
    ):
        out = sim.buffer(np.zeros((rows, 37), dtype), "out")
        arguments = weights.arguments(sim) | {3: sim.buffer(x, "input"), 4: out}
        arguments[5] = structure(rows, 96, 37, 37, weights.group_shift)
        run(
            sim,
            {
                "library": library,
                "kernel": f"{name}_{kind}_m{m}",
                "arguments": arguments,
                "groups": -(-37 // per_group),
                "group": 256,
            },
        )
        wide = x.astype(np.float64)
        magnitude = np.abs(wide) @ np.abs(weights.dense.T)
        assert_near(out.array(dtype, (rows, 37)), wide @ weights.dense.T, magnitude, stored)


def unfused(sim: Any, kernels: Any, folder: Any) -> UnfusedModel:
    names = ("unfused_project", "unfused_attention", "unfused_experts", "raw_delta_rule", "strided_attention")
    libraries = {name: kernels(f"ablation/{name}", "float") for name in names}
    libraries |= {name: kernels(name, "float") for name in ("head", "matrix_simdgroup")}
    return UnfusedModel(sim, libraries, folder)


def test_unfused_launches_give_the_logits_of_the_model(sim: Any, kernels: Any, tiny: Any) -> None:
    """A prompt in steps of some rows, with reads of the cache without order."""
    folder = tiny(replace(SHAPES["moe"], layers=2, interval=2), "mlx-4bit-g64", dtype="bfloat16")
    model = unfused(sim, kernels, folder)
    steps, at = [], 0
    for rows in (8, 1, 3):
        steps.append(model.step(PROMPT[at : at + rows], rows))
        at += rows
    wanted = model.model.forward(PROMPT[:at]).logits
    np.testing.assert_allclose(np.concatenate(steps), wanted, atol=1e-4)


def test_fusions_save_more_than_half_of_the_launches(sim: Any, kernels: Any, tiny: Any) -> None:
    """A GDN layer takes 16 launches instead of 6, an attention layer 19 instead of 8."""
    folder = tiny(replace(SHAPES["moe"], layers=2, interval=2), "mlx-4bit-g64", dtype="bfloat16")
    model = unfused(sim, kernels, folder)
    sim.reset_counters()
    model.step(PROMPT[:1], 1)
    assert sim.counters()["dispatches"] == 16 + 19 + 3
