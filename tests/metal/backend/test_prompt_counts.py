"""What a prompt costs at the real layer pattern, with each technique and without: launches, passes, bytes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from backend_support import ids_of, load
from oracles.shapes import SHAPES

SHAPE = replace(
    SHAPES["moe"], layers=40, hidden=64, heads=8, kv_heads=1, key_heads=1, value_heads=2, experts=32,
    top_k=8, moe_width=64, shared_width=64,
)  # fmt: skip
DELTA, ATTENTION, ENDS = 14, 13, 1  # launches of a layer of each kind; of the tokens' rows
MOST = 700

Tiny = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tiny: Tiny) -> Path:
    return tiny(SHAPE, "mlx-4bit-g64", dtype="bfloat16")


def test_a_chunk_is_one_command_buffer_of_few_launches(
    metal_lily: ModuleType, sim: Any, folder: Path
) -> None:
    """All launches of a chunk are handed over at once: the host can't have waited for one of them."""
    sim.configure(checks=False)
    chunk = 30 * DELTA + 10 * ATTENTION + ENDS
    assert chunk + 2 <= MOST
    with metal_lily.Engine.load(folder, backend="metal") as engine:
        for length in (9, 100, 512):
            sim.reset_counters()
            engine.prefill(ids_of(SHAPE.vocab, length).tolist())
            counters = sim.counters()
            assert counters["command_buffers"] == counters["encoders"] == 1
            assert counters["dispatches"] == chunk + 1  # the last row's logits
    model = load(folder, chunk=32)
    sim.reset_counters()
    model.forward(model.new_sequence(), ids_of(SHAPE.vocab, 96))
    assert sim.counters()["command_buffers"] == 3
    assert sim.counters()["dispatches"] == 3 * chunk + 1


WITHOUT = (
    "compressed_weights",
    "gpu_routing",
    "fitted_tiles",
    "register_scan",
    "gqa_packing",
    "matrix_prefill",
)
ROWS = 128
MIXTURE = 3 * SHAPE.hidden * SHAPE.moe_width  # numbers of an expert's matrices


@pytest.mark.slow
def test_what_a_chunk_costs_without_each_technique(metal_lily: ModuleType, sim: Any, folder: Path) -> None:
    """By the command stream, as `lily bench ablate --backend metal` prints it."""
    sim.configure(checks=False)
    count = importlib.import_module("lily_py.bench.ablate_metal").count_ablations
    costs = [cost.prompt.counts for cost in count(str(folder), names=WITHOUT, context=ROWS, decode=1)]
    whole, expanded, host, tiles, blocks, heads, few = costs
    launches = 30 * DELTA + 10 * ATTENTION + ENDS + 1  # the last row's logits
    assert (whole["launches"], whole["barriers"], whole["command buffers"]) == (launches, launches - 1, 1)
    # Two matrices of a mixer, routed and shared experts both ways; most wait for nothing that runs.
    assert expanded["launches"] == launches + 40 * (2 + 4)
    assert expanded["barriers"] == launches - 1 + 40
    assert expanded["multiply-adds"] == whole["multiply-adds"]
    for moved in ("bytes read", "bytes written"):
        assert expanded[moved] - whole[moved] == 2 * expanded_numbers()  # bf16
    # Three launches of a mixture are the host's, and the pass before them ends.
    assert host["launches"] == launches - 40 * 3
    assert host["command buffers"] == 1 + 40
    # An expert's last rows are filled up to 8, or to 64: half of that on average.
    assert tiles["launches"] == launches
    assert tiles["multiply-adds"] - whole["multiply-adds"] == 40 * SHAPE.experts * (32 - 4) * MIXTURE
    for name in ("launches", "barriers", "command buffers", "bytes read", "bytes written"):
        assert blocks[name] == heads[name] == whole[name]
    # Eight rows at a time: a token's launches, without its choice but for the last row's logits.
    assert few["launches"] == ROWS // 8 * (30 * 6 + 10 * 8 + 1) + 1
    assert few["command buffers"] == ROWS // 8
    assert few["bytes read"] > 4 * whole["bytes read"]


def expanded_numbers() -> int:
    """Numbers of all matrices but routers, embedding and head."""
    values, keys = SHAPE.value_heads * SHAPE.gdn_dim, SHAPE.kv_heads * SHAPE.head_dim
    heads = SHAPE.heads * SHAPE.head_dim
    delta = SHAPE.conv_channels + 2 * values + 2 * SHAPE.value_heads
    attention = 3 * heads + 2 * keys
    assert SHAPE.moe_width == SHAPE.shared_width
    return SHAPE.hidden * (30 * delta + 10 * attention) + 40 * (SHAPE.experts + 1) * MIXTURE
