"""Memory of prompts on the GPU: what blocks take, how they shrink, which contexts are admitted."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backend_support import ids_of, load, sampler_of, state_bytes, with_positions
from oracles.shapes import SHAPES, Shape

MOE = replace(SHAPES["moe"], layers=2, interval=2)
PAGE = 16384
"""Of the GPU's memory."""
LONG = 262_144


@pytest.fixture(autouse=True)
def fast(metal_lily: ModuleType, sim: Any) -> None:
    """Kernels without the checker; what the simulated GPU has is put back after the test.

    The simulated GPU counts the buffers of all engines: those of other tests must be gone.
    """
    gc.collect()
    if alive := sim.allocated_bytes():
        pytest.skip(f"{alive} bytes of engines that other tests left alive count against this one's memory")
    sim.configure(checks=False)


@pytest.fixture
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny(MOE, "mlx-4bit-g64", dtype="bfloat16")


@pytest.fixture
def long_folder(folder: Path, tmp_path: Path) -> Path:
    """The same model for a longer context."""
    return with_positions(folder, tmp_path / "long", LONG)


def documented(shape: Shape, rows: int, element: int = 2, positions: int = 4096) -> int:
    """Bytes of a block for sequences of so many positions, by the formula of docs/metal-prefill.md."""
    hidden, slots = shape.hidden, shape.top_k + (shape.shared_width > 0)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    values = shape.value_heads * shape.gdn_dim
    projected = max(shape.conv_channels + values + 2 * shape.value_heads, 2 * queries + 2 * keys)
    always = rows * (4 * hidden + element * hidden + 4)
    delta = rows * (element * shape.conv_channels + 4 * (2 * shape.value_heads + shape.key_heads))
    splits, cell = -(-positions // 16384), 4 * (queries + 2 * shape.heads)
    cells = max(rows, 64 * splits, delta // cell) if splits > 1 else 0
    mixer = rows * element * (projected + max(values, queries)) + max(delta, cells * cell)
    stride = max(shape.moe_width, shape.shared_width)
    tile = 64 if rows * shape.top_k >= 64 * shape.experts else 8
    capacity = -(-rows * shape.top_k // tile) + shape.experts + -(-rows // tile)
    mixture = rows * (
        4 * (shape.experts + 1) + 4 * (2 * shape.top_k + 1) + 4 * shape.top_k + 4 * slots
        + element * slots * stride + element * slots * hidden
    )  # fmt: skip
    mixture += 4 * shape.experts * -(-rows // 32) + 16 * capacity
    return always + max(mixer, mixture)


@pytest.mark.parametrize("rows", [512, 2048])
@pytest.mark.parametrize("ablate", [(), ("bf16_activations",)])
def test_a_block_takes_what_is_documented(folder: Path, rows: int, ablate: tuple[str, ...]) -> None:
    """Up to the ends of pages and parts; the same number in the description."""
    model = load(folder, chunk=rows, ablate=ablate)
    stated = model.memory["prompt buffers"]
    wanted = documented(MOE, rows, 4 if ablate else 2)
    assert wanted <= stated <= wanted + PAGE + 30 * 256 + 0.01 * wanted
    assert f"{stated / 2**20:.2f} MiB for prompts of {rows} rows at a time" in model.backend


@pytest.mark.parametrize(("heads", "rows"), [(4, 64), (32, 64), (32, 2048)])
def test_attention_in_splits_takes_what_is_documented(
    tiny: Callable[..., Path], tmp_path: Path, heads: int, rows: int
) -> None:
    """Whether or not it takes more than the delta rule, and a cell a row more than those of few rows."""
    shape = replace(MOE, heads=heads)
    folder = with_positions(tiny(shape, "mlx-4bit-g64", dtype="bfloat16"), tmp_path / "long", LONG)
    stated = load(folder, chunk=rows).memory["prompt buffers"]
    wanted = documented(shape, rows, positions=LONG)
    assert wanted <= stated <= wanted + PAGE + 30 * 256 + 0.01 * wanted


def test_a_chunk_suits_the_backend_unless_it_is_given(folder: Path) -> None:
    assert load(folder).chunk == 4096  # two blocks
    assert load(folder, backend="cpu").chunk == 512
    assert load(folder, chunk=100).chunk == 100
    assert "for prompts of 1000 rows at a time" in load(folder, max_context=1000).backend


def test_blocks_are_longer_where_products_are_fast(sim: Any, long_folder: Path) -> None:
    sim.configure(gpu=("applegpu_g17s", 10), macos=(26, 2))
    for ablate, rows in (((), 4096), (("tensor_operations",), 2048)):
        model = load(long_folder, ablate=ablate)
        assert model.chunk == 2 * rows
        assert f"for prompts of {rows} rows at a time" in model.backend


def test_blocks_shrink_where_memory_is_short_and_the_bytes_stay(sim: Any, folder: Path) -> None:
    ids = ids_of(MOE.vocab, 700)
    results = []
    for working_set in (1 << 30, 10 << 20, 7 << 20):
        sim.configure(working_set=working_set)
        model = load(folder)
        sequence = model.new_sequence()
        logits = model.forward(sequence, ids)
        rows = int(re.search(r"prompts of (\d+) rows", model.backend)[1])  # type: ignore[index]
        results.append((rows, logits.tobytes(), state_bytes(sequence, 1, 1)))
    assert results[0][0] == 2048
    assert results[0][0] > results[1][0] > results[2][0] >= 64
    assert results[0][1:] == results[1][1:] == results[2][1:]


def test_a_long_context_is_admitted_by_arithmetic(
    metal_lily: ModuleType, sim: Any, long_folder: Path
) -> None:
    """Nothing of it is allocated before it is used."""
    sim.configure(working_set=4 << 30)
    with metal_lily.Engine.load(long_folder, backend="metal", max_context=LONG) as engine:
        info = engine.info()
        assert info.context == LONG
        assert info.memory_for(LONG) > LONG * info.kv_per_token > 100 << 20
        assert sum(b for n, b in info.gpu_memory.items() if n != "limit") < 30 << 20


def test_a_context_that_does_not_fit_is_refused_with_one_that_does(
    metal_lily: ModuleType, sim: Any, long_folder: Path
) -> None:
    sim.configure(working_set=64 << 20)
    with pytest.raises(metal_lily.MemoryBudgetError) as error:
        metal_lily.Engine.load(long_folder, backend="metal", max_context=LONG)
    message = str(error.value)
    assert f"a context of {LONG} tokens needs" in message
    assert "the GPU's limit is 64.00 MiB" in message
    fits = int(re.search(r"(\d+) tokens would fit", message)[1])  # type: ignore[index]
    assert 10_000 < fits < LONG
    metal_lily.Engine.load(long_folder, backend="metal", max_context=fits).close()
    # What fits is said for tables as long as the context that was asked for; they are a part in a hundred.
    with pytest.raises(metal_lily.MemoryBudgetError):
        metal_lily.Engine.load(long_folder, backend="metal", max_context=fits + fits // 50)
    # Without a wish the engine loads, and each request is admitted or refused.
    with metal_lily.Engine.load(long_folder, backend="metal") as engine:
        with pytest.raises(metal_lily.MemoryBudgetError, match=r"of the GPU's memory .* tokens would fit"):
            engine.generate(list(range(100)), max_tokens=LONG - 100)
        assert engine.generate(list(range(20)), max_tokens=2).token_ids


def test_a_limit_below_the_recommended_one_counts(metal_lily: ModuleType, long_folder: Path) -> None:
    with pytest.raises(metal_lily.MemoryBudgetError, match=r"limit is 60\.00 MiB"):
        metal_lily.Engine.load(long_folder, backend="metal", max_context=LONG, memory_limit="60MiB")


def test_a_model_that_does_not_fit_is_refused(metal_lily: ModuleType, sim: Any, folder: Path) -> None:
    sim.configure(working_set=1 << 20)
    with pytest.raises(metal_lily.MemoryBudgetError, match="doesn't fit into GPU memory: the weights"):
        load(folder)


def test_what_is_stated_is_enough_for_the_whole_context(
    metal_lily: ModuleType, sim: Any, folder: Path
) -> None:
    """With exactly the memory for a context of 200 tokens: a prompt, a snapshot, and steps to its end."""
    options = {"max_context": 200, "chunk": 64, "whole_context": True}
    sim.configure(working_set=1 << 30)
    model = load(folder, **options)
    needed = sum(nbytes for name, nbytes in model.memory.items() if name != "limit")
    needed += -(-4 * 64 * model.kv_bytes_per_token // PAGE) * PAGE
    needed += 3 * -(-model.recurrent_bytes // PAGE) * PAGE
    sim.configure(working_set=needed - PAGE)
    with pytest.raises(metal_lily.MemoryBudgetError, match="192 tokens would fit"):
        load(folder, **options)
    sim.configure(working_set=needed)
    model = load(folder, **options)
    sequence, sampler = model.new_sequence(), sampler_of(MOE.vocab)
    token = int(np.argmax(model.forward(sequence, ids_of(MOE.vocab, 150))))
    sequence.snapshot()
    while sequence.length < 200:
        token = model.step(sequence, token, sampler)


def test_no_expanded_weight_matrix_has_room(folder: Path) -> None:
    """Weights take what the checkpoint stores; what is stated is all there is (the test before)."""
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    memory, off = (load(folder, ablate=ablate).memory for ablate in ((), ("compressed_weights",)))
    assert memory["weights"] == off["weights"] < 1.1 * stored
    expanded = 2 * MOE.experts * 2 * MOE.moe_width * MOE.hidden
    assert off["prompt buffers"] - memory["prompt buffers"] >= expanded
