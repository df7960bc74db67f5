"""Short runs under the checker, and counts of a token at the real layer pattern."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from backend_support import continued, ids_of, load, sampler_of
from oracles.shapes import SHAPES

FEW_ROWS = ("matrix_prefill",)
"""Prompts eight rows at a time: the kernels of many rows have tests of their own."""


def test_prompts_and_steps_have_no_fault_and_no_schedule_shows(
    metal_lily: ModuleType, sim: Any, tiny: Callable[..., Path]
) -> None:
    """A prompt, steps ahead of their reader over the end of a page, a step back, and a batch; three seeds."""
    shape = replace(SHAPES["moe"], layers=4)
    model = load(tiny(shape, "mlx-4bit-g64", dtype="bfloat16"), ablate=FEW_ROWS)
    results = []
    for seed in (0, 1, 2):
        sim.configure(seed=seed)
        first, second = model.new_sequence(), model.new_sequence()
        tokens = continued(model, first, ids_of(shape.vocab, 61), 6, shape.vocab)
        first.snapshot()
        tokens += continued(model, second, ids_of(shape.vocab, 3), 2, shape.vocab)
        logits = model.forward_each([first, second], np.array([1, 2], np.int32))
        results.append((tokens, logits.tobytes(), first.recurrent_state(0).tobytes()))
    assert sim.diagnostics() == []
    assert results[0] == results[1] == results[2]


def test_draws_by_chance_have_no_fault(metal_lily: ModuleType, sim: Any, tiny: Callable[..., Path]) -> None:
    shape = replace(SHAPES["moe"], layers=4)
    model = load(tiny(shape, "mlx-4bit-g64", dtype="bfloat16"), ablate=FEW_ROWS)
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    options |= {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "logit_bias": ((3, 1.5),)}
    results = []
    for seed in (0, 1, 2):
        sim.configure(seed=seed)
        sequence, sampler = model.new_sequence(), sampler_of(shape.vocab - 9, 5, **options)
        sampler.observe(ids_of(shape.vocab, 4))
        model.forward(sequence, ids_of(shape.vocab, 4))
        token, tokens = 7, []
        for _ in range(6):
            token = model.step(sequence, token, sampler)
            tokens.append(token)
        results.append(tokens)
    assert sim.diagnostics() == []
    assert results[0] == results[1] == results[2]
    assert model.draws == {"backend": 18}
    assert max(results[0]) < shape.vocab - 9


def test_a_token_of_forty_layers_in_launches_stages_and_bytes(
    metal_lily: ModuleType, sim: Any, tiny: Callable[..., Path]
) -> None:
    """30 Gated DeltaNet layers of 6 launches, 10 attention layers of 8, embedding, head, choice.

    Bytes read and written, each distinct one counted once per launch, are within 3 % of the weights, the
    states both ways, and the cache; measured at widths where activations are small beside the weights.
    """
    shape = replace(
        SHAPES["moe"], layers=40, experts=4, hidden=512, moe_width=512, shared_width=512, heads=8,
        kv_heads=2, key_heads=4, value_heads=8, gdn_dim=64, vocab=1024,
    )  # fmt: skip
    folder = tiny(shape, "mlx-4bit-g64", dtype="bfloat16")
    model = load(folder, ablate=FEW_ROWS)
    sequence = model.new_sequence()
    token = int(model.forward(sequence, ids_of(shape.vocab, 4)).argmax())
    sampler = sampler_of(shape.vocab)
    token = model.step(sequence, token, sampler)
    sequence.snapshot()  # takes the step ahead back
    sim.reset_counters()
    model.step(sequence, token, sampler)
    sequence.snapshot()
    counters = sim.counters()
    assert sim.diagnostics() == []
    assert counters["command_buffers"] == 2  # the step, and the one ahead of it
    assert counters["dispatches"] == 2 * 263
    assert counters["stages"] == 2 * 263
    needed = 2 * needed_bytes(shape, model, sequence.length)
    moved = counters["bytes_read"] + counters["bytes_written"]
    assert needed < moved < 1.03 * needed, f"{moved / needed:.3f}"
    issued = counters["bytes_loaded"] + counters["bytes_stored"]
    assert issued < 1.6 * needed, f"{issued / needed:.3f}"


def needed_bytes(shape: Any, model: Any, length: int) -> int:
    """Bytes that a token can't do without: weights of what it uses, states read and written, its cache."""

    def packed(rows: int, cols: int, bits: int = 4) -> float:
        return rows * cols * (bits / 8 + 4 / 64)  # a scale and a bias of two bytes per 64

    h, attention = shape.hidden, sum(shape.is_attention(i) for i in range(shape.layers))
    values = shape.value_heads * shape.gdn_dim
    delta = packed(shape.conv_channels + values + 2 * shape.value_heads, h) + packed(h, values)
    delta += shape.conv_channels * 4 * shape.conv  # taps, fp32
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    full = packed(2 * queries + 2 * keys, h) + packed(h, queries)
    experts = shape.top_k * 3 * packed(shape.moe_width, h) + 3 * packed(shape.shared_width, h)
    experts += packed(shape.experts + 1, h, 8)
    norms = 4 * h * (2 * shape.layers + 1)
    weights = (shape.layers - attention) * delta + attention * full + shape.layers * experts + norms
    weights += packed(shape.vocab, h) + packed(1, h)
    state = 2 * 4 * (shape.layers - attention) * shape.value_heads * shape.gdn_dim**2
    remembered = (shape.layers - attention) * shape.conv_channels * 2 * shape.conv
    return int(weights + state + remembered + length * model.kv_bytes_per_token)
