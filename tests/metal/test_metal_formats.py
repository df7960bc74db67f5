"""Every format of weights in every kernel that reads them: the same products, against dequantised float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from metal_reference import (
    BF16,
    METAL,
    SMALL_FLOATS,
    Array,
    Weights,
    assert_near,
    on_every_seed,
    packed,
    quantised,
    rms,
    run,
    sigmoid,
    silu,
    structure,
)
from test_metal_experts import Mixture, Shape, chosen, down, routed, up
from test_metal_head import embed, head
from test_metal_project import block, capacity, inputs, launch, norm_project, shape

from metalsim.msl.static_check import check  # isort: skip

# Name of the kernels, group, type of scales and biases.
CASES = [
    ("b2", 32, "bfloat"),
    ("b3", 64, "bfloat"),
    ("b4", 32, "half"),
    ("b5", 32, "bfloat"),
    ("b6", 128, "bfloat"),
    ("b8", 64, "float"),
    ("f16", 32, "bfloat"),
    ("f32", 32, "bfloat"),
    ("mxfp4", 32, "uchar"),
    ("mxfp8", 32, "uchar"),
    ("nvfp4", 16, "uchar"),
]
SCALES = {"bfloat": BF16, "half": np.float16, "float": np.float32, "uchar": np.uint8}
every_format = pytest.mark.parametrize(("kind", "group", "scale"), CASES, ids=lambda value: str(value))


def built(kernels: Any, file: str, kind: str, scale: str) -> Any:
    """The library that a host compiles for one format, with fp32 activations."""
    return kernels(file, "float", f"LILY_FORMAT={kind}", f"LILY_SCALE={scale}")


def random(rng: Any, rows: int, cols: int, kind: str, group: int, scale: str) -> Weights:
    return quantised(rng, rows, cols, kind, group, SCALES[scale])


def near(found: Array, x: Array, weights: Weights) -> None:
    """`found` is x times the matrix."""
    wide = np.asarray(x, np.float64)
    assert_near(found, wide @ weights.dense.T, np.abs(wide) @ np.abs(weights.dense.T), 2.0**-22)


@every_format
@pytest.mark.parametrize("file", ["project", "experts", "head", "combine"])
def test_a_build_for_one_format_passes_the_static_check(
    compiler: Any, kind: str, group: int, scale: str, file: str
) -> None:
    define = [f"LILY_FORMAT={kind}", f"LILY_SCALE={scale}"]
    assert check(METAL / f"{file}.metal", include=[METAL], define=define, language="3.1") == []


@every_format
def test_projection(sim: Any, kernels: Any, rng: Any, kind: str, group: int, scale: str) -> None:
    """More than one tile for eight rows, an odd number of outputs, and rows whose bits are their own."""
    weights = random(rng, 21, 1152, kind, group, scale)
    library = built(kernels, "project", kind, scale)
    x, gain = inputs(rng, 8, 1152)
    together = norm_project(sim, library, weights, x, gain, np.float32)
    near(together, rms(x) * gain, weights)
    for count in (1, 2, 3):
        few = on_every_seed(sim, lambda n=count: norm_project(sim, library, weights, x[:n], gain, np.float32))
        assert few.tobytes() == together[:count].tobytes()


@every_format
def test_projection_onto_the_residual(
    sim: Any, kernels: Any, rng: Any, kind: str, group: int, scale: str
) -> None:
    weights = random(rng, 19, 256, kind, group, scale)
    x = rng.normal(0, 1, (3, 256)).astype(np.float32)
    residual = sim.buffer(np.zeros((3, 19), np.float32), "residual")
    arguments = {3: sim.buffer(x, "input"), 4: residual, 5: shape(weights, x, 19, 19)}
    launch(
        sim, built(kernels, "project", kind, scale), "project_add", weights, arguments,
        rows=3, per_half=block(2, capacity(3)), simdgroups=4, outputs=19,
    )  # fmt: skip
    near(residual.array(np.float32, (3, 19)), x, weights)


@every_format
def test_experts(sim: Any, kernels: Any, rng: Any, kind: str, group: int, scale: str) -> None:
    """Both launches of a mixture whose experts and shared expert have the format."""
    s = Shape(experts=5, top_k=2, hidden=128, width=256, shared_width=128, format=kind, shared_format=kind)
    library = built(kernels, "experts", kind, scale)
    wide = [(5 * 512, 128), (5 * 128, 256), (256, 128), (128, 128)]
    mixture = Mixture(s, *(random(rng, rows, cols, kind, group, scale) for rows, cols in wide))
    normed, logits = routed(rng, s, 2, np.float32)
    acts, routing = up(sim, library, mixture, normed, logits, np.float32)
    before = rng.normal(0, 1, (2, 128)).astype(np.float32)
    found = down(sim, library, mixture, acts, routing, before)
    wanted, magnitude = before.astype(np.float64), np.abs(before).astype(np.float64)
    for row in range(2):
        x = normed[row].astype(np.float64)
        experts, weights = chosen(s, logits[row])
        for slot, (expert, weight) in enumerate(
            zip([*experts, None], [*weights, sigmoid(logits[row, -1])], strict=True)
        ):
            gate, value = np.split(mixture.slot(mixture.up, mixture.shared_up, expert) @ x, 2)
            size = np.split(np.abs(mixture.slot(mixture.up, mixture.shared_up, expert)) @ np.abs(x), 2)
            near_zero = (np.abs(gate) + size[0]) * (np.abs(value) + size[1])
            assert_near(acts[row, slot, : len(gate)], silu(gate) * value, near_zero, 2.0**-22)
            matrix = mixture.slot(mixture.down, mixture.shared_down, expert)
            act = acts[row, slot, : matrix.shape[1]].astype(np.float64)
            wanted[row] += weight * (matrix @ act)
            magnitude[row] += weight * (np.abs(matrix) @ np.abs(act))
    assert_near(found, wanted, magnitude, 2.0**-22)


@every_format
def test_router(sim: Any, kernels: Any, rng: Any, kind: str, group: int, scale: str) -> None:
    weights = random(rng, 18, 128, kind, group, scale)
    x, gain = inputs(rng, 2, 128)
    logits, normed = (sim.buffer(np.zeros((2, n), np.float32)) for n in (18, 128))
    arguments = weights.arguments(sim) | {3: sim.buffer(x), 4: sim.buffer(gain), 5: logits, 6: normed}
    arguments[7] = structure(2, 128, 18, 18, weights.group_shift, 1e-6, 1)
    run(
        sim,
        {
            "library": built(kernels, "experts", kind, scale),
            "kernel": f"route_{kind}_m2",
            "arguments": arguments,
            "groups": 2,
            "group": 256,
        },
    )
    near(logits.array(np.float32, (2, 18)), rms(x) * gain, weights)


@every_format
def test_ends(sim: Any, kernels: Any, rng: Any, kind: str, group: int, scale: str) -> None:
    """Embedded rows are exact up to the rounding of w = s q + b; the head's choice is its largest logit."""
    library = built(kernels, "head", kind, scale)
    weights = random(rng, 67, 256, kind, group, scale)
    tokens = np.array([66, 0, 7], np.uint32)
    found = on_every_seed(sim, lambda: embed(sim, library, weights, tokens))
    wanted = weights.dense[tokens]
    if scale in ("bfloat", "uchar"):  # products of scale and code are exact
        assert (found == wanted.astype(np.float32)).all()
    assert_near(found, wanted, np.abs(wanted), 2.0**-23)
    x, gain = inputs(rng, 2, 256)
    logits, _, best, _ = head(sim, library, weights, x, gain, np.arange(2))
    near(logits, rms(x) * gain, weights)
    assert best.tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("kind", SMALL_FLOATS)
def test_every_small_float_and_scale_is_its_number(sim: Any, kernels: Any, rng: Any, kind: str) -> None:
    """All codes under all scales, subnormal and not a number among them, through the embedding."""
    bits, group, numbers, factors = SMALL_FLOATS[kind]
    codes = np.tile(np.arange(256) % 2**bits, (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 256 // group, axis=1)
    dense = factors[scales].repeat(group, axis=1) * numbers[codes]
    table = Weights(kind, group, packed(codes, bits), scales, np.zeros(1, np.uint8), dense)
    found = embed(sim, built(kernels, "head", kind, "uchar"), table, np.arange(256, dtype=np.uint32))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, dense.astype(np.float32))
