"""Prompts of checkpoints whose gate and up differ in format: the kernels of many rows take them too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backend_support import EXACT, ids_of, load, prompt
from oracles.checkpoints import Quant
from oracles.reference import Reference
from oracles.result import TOLERANCES
from oracles.shapes import SHAPES, Shape

EIGHT, FINE = Quant(8, 64), Quant(4, 32)
MOE = replace(SHAPES["moe"], layers=2, interval=2)
DENSE = replace(SHAPES["dense"], layers=2, interval=2)
UP, SHARED_UP = ("*.switch_mlp.up_proj", EIGHT), ("*.shared_expert.up_proj", EIGHT)
SHARED = ("*.shared_expert.*", EIGHT)
MIXTURES = {
    "dense": (DENSE, (("*.mlp.up_proj", EIGHT),), 2),
    "groups of a dense layer": (DENSE, (("*.mlp.gate_proj", FINE),), 2),
    "experts": (MOE, (UP,), 3),
    "groups of experts": (MOE, (("*.switch_mlp.gate_proj", FINE),), 3),
    "shared": (MOE, (SHARED_UP,), 3),
    "both": (MOE, (UP, SHARED_UP), 2),
    "experts beside a shared one in eight bits": (MOE, (UP, SHARED), 4),
    "shared of another width": (replace(MOE, shared_width=64), (UP, SHARED_UP), 3),
}
"""Shapes, formats beside four bits in groups of 64, and launches of a layer beyond those of one format.

Gate and up of one format are a launch; apart two and SwiGLU. Routed and shared experts of one format share
launches of products, and SwiGLU if they are as wide; without it the shared one has its own, down too.
"""
ROWS = (8, 9, 63, 64, 65, 75)
PATHS = {
    "simdgroup matrices": ("applegpu_g16s", 9),
    "tensor tiles": ("applegpu_g17s", 10),
    "tensor fragments": ("applegpu_g17s", 10),
}

Tiny = Callable[..., Path]


pytestmark = pytest.mark.usefixtures("fast")


def built(tiny: Tiny, name: str, **options: Any) -> tuple[Path, Shape]:
    shape, overrides, _ = MIXTURES[name]
    folder = tiny(shape, "mlx-4bit-g64", dtype="bfloat16", overrides=overrides, **options)
    return folder, shape


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_are_those_of_the_model_and_of_the_cpu(tiny: Tiny, name: str) -> None:
    """Prompts on both sides of eight rows, where kernels change, and of 64, where blocks of rows end."""
    folder, shape = built(tiny, name)
    wanted = Reference(folder).forward(ids_of(shape.vocab, max(ROWS))).logits
    model = load(folder, **EXACT)
    cpu = load(folder, "cpu", kv_dtype="float32", ablate=("integer_dot",))
    for rows in ROWS:
        ids = ids_of(shape.vocab, max(ROWS))[:rows]
        found, other = (m.forward(m.new_sequence(), ids, all=True) for m in (model, cpu))
        np.testing.assert_allclose(found, wanted[:rows], atol=TOLERANCES["logits"])
        np.testing.assert_allclose(found, other, atol=TOLERANCES["logits"])


@pytest.mark.parametrize("name", MIXTURES)
def test_a_prompt_is_one_pass_with_some_launches_more(tiny: Tiny, sim: Any, name: str) -> None:
    """Any number of rows from nine on: none goes through the kernels of few rows."""
    folder, shape = built(tiny, name)
    mixed, uniform = load(folder), load(tiny(shape, "mlx-4bit-g64", dtype="bfloat16"))
    for rows in (9, 64, 200):
        sim.log_dispatches()
        counts = prompt(mixed, shape, rows)[2]
        kernels = {work.kernel for work in sim.dispatches()}
        one_format = prompt(uniform, shape, rows)[2]
        assert counts["passes"] == one_format["passes"] == 1
        assert counts["command buffers"] == 1
        assert counts["launches"] - one_format["launches"] == MIXTURES[name][2] * shape.layers
        assert "swiglu" in kernels
        assert not {kernel for kernel in kernels if kernel.startswith(("project_b", "expert_product"))}


@pytest.mark.parametrize("name", ["dense", "experts beside a shared one in eight bits"])
@pytest.mark.parametrize("path", PATHS)
def test_every_unit_that_multiplies_takes_them(tiny: Tiny, sim: Any, path: str, name: str) -> None:
    """By force; with bf16 activations within their rounding, and the same bits in any chunks."""
    folder, shape = built(tiny, name)
    ablate = ("tensor_fragments",) if path == "tensor tiles" else ()
    sim.configure(checks=False, gpu=PATHS[path], macos=(26, 2))
    model = load(folder, ablate=ablate)
    assert f"prompts by {path})" in model.backend
    wanted = Reference(folder).forward(ids_of(shape.vocab, 75)).logits
    found = prompt(model, shape)
    assert np.sqrt(np.mean((found[0] - wanted[-1]) ** 2) / np.mean(wanted[-1] ** 2)) < 0.03
    for chunk in (19, 40):
        pieces = prompt(load(folder, ablate=ablate, chunk=chunk), shape)
        np.testing.assert_array_equal(pieces[0], found[0])
        assert pieces[1] == found[1]
        assert pieces[2]["passes"] == -(-75 // chunk)


@pytest.mark.parametrize("technique", ["compressed_weights", "fitted_tiles", "gpu_routing"])
@pytest.mark.parametrize("name", ["dense", "experts beside a shared one in eight bits"])
@pytest.mark.parametrize("path", ["simdgroup matrices", "tensor fragments"])
def test_each_technique_can_be_switched_off(
    tiny: Tiny, sim: Any, path: str, name: str, technique: str
) -> None:
    """The same bytes; with the host's exponentials the same within rounding."""
    folder, shape = built(tiny, name)
    sim.configure(checks=False, gpu=PATHS[path], macos=(26, 2))
    whole, less = prompt(load(folder), shape), prompt(load(folder, ablate=(technique,)), shape)
    if technique == "gpu_routing" and shape.is_moe:
        np.testing.assert_allclose(less[0], whole[0], atol=0.03 * np.abs(whole[0]).max())
        assert less[2]["command buffers"] == 1 + shape.layers
    else:
        np.testing.assert_array_equal(less[0], whole[0])
        assert less[1] == whole[1]


@pytest.mark.parametrize("name", ["dense", "both", "experts beside a shared one in eight bits"])
def test_three_schedules_agree_and_nothing_is_reported(tiny: Tiny, sim: Any, name: str) -> None:
    folder, shape = built(tiny, name)
    results = []
    for seed in (0, 1, 2):
        sim.configure(checks=True, seed=seed)
        logits, state, _ = prompt(load(folder), shape, 37)
        results.append((logits.tobytes(), state))
    assert sim.diagnostics() == []
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("hidden", [128, 256])
def test_products_share_the_memory_of_what_follows_them(tiny: Tiny, hidden: int) -> None:
    """Gate and up of an entry take twice its width; its result of down, which comes later, `hidden`."""
    shape = replace(MOE, hidden=hidden, top_k=6)
    options = {"dtype": "bfloat16"}
    mixed = load(tiny(shape, "mlx-4bit-g64", overrides=(UP,), **options), chunk=512)
    uniform = load(tiny(shape, "mlx-4bit-g64", **options), chunk=512)
    more = mixed.memory["prompt buffers"] - uniform.memory["prompt buffers"]
    slots = shape.top_k + 1
    assert more == 2 * 512 * slots * max(0, 2 * shape.moe_width - hidden)


def test_a_draft_head_takes_a_prompt_in_one_pass(tiny: Tiny, sim: Any) -> None:
    """Of weights of one format and of mixed ones; only its two inputs meet eight rows at a time."""
    for overrides in ((), (UP, SHARED_UP)):
        folder = tiny(MOE, "mlx-4bit-g64", dtype="bfloat16", mtp=True, overrides=overrides)
        model, text = load(folder), ids_of(MOE.vocab, 76)
        sim.log_dispatches()
        model.draft(model.new_sequence(), model.new_head_sequence(), text[:-1], text[1:])
        kernels = [work.kernel for work in sim.dispatches()]
        assert sum(kernel.startswith("attend_rows") for kernel in kernels) == 2  # the trunk's and the head's
        assert sum(kernel.startswith("combine_hidden") for kernel in kernels) == -(-75 // 8)
        assert not any(kernel.startswith("norm_project") for kernel in kernels)


@pytest.mark.parametrize("taps", [5, 8])
def test_taps_without_kernels_are_refused_by_name(metal_lily: ModuleType, tiny: Tiny, taps: int) -> None:
    folder = tiny(replace(DENSE, conv=taps), "mlx", dtype="float32")
    with pytest.raises(metal_lily.BackendError, match=rf"linear_conv_kernel_dim is {taps}; .* 2, 3 and 4"):
        load(folder)
