"""Greedy text of 200 tokens as shipped, bf16 activations and all, beside that of the CPU.

The CPU's text is fed to both. On models whose experts are all chosen, rounding changes numbers and no choice
of experts: logits are within `DISTANCE` of the CPU's, and where its two largest are farther apart than that,
both choose the same token. Arithmetic alone would allow another one up to twice the distance, if the one
logit fell and the other rose as far as any; those that differ are at most 0.024 apart on the CPU.

Where experts are chosen, a near tie of the router's goes another way, and with it the numbers of every token
behind it. Then no bound holds for a single token (`test_backend_shapes.py` compares such models in fp32),
but most must still be the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_support import all_chosen, continued, ids_of, load, sampler_of
from numpy.typing import NDArray
from oracles.shapes import SHAPES, Shape

PROMPT, TOKENS = 75, 200
DISTANCE = 0.05  # of the largest logit; 0.045 on the eight layers of `moe`, at most 0.039 on the others
SAME = 0.75  # of the tokens, of one in 320 by chance; 0.795 on `moe`, at least 0.87 on the others

Tiny = Callable[..., Path]


pytestmark = pytest.mark.usefixtures("fast")


def beside_the_cpu(folder: Path, shape: Shape) -> tuple[Any, NDArray[np.int32], list[int], NDArray[Any]]:
    """The model on Metal, the prompt and the CPU's text behind it, Metal's choices behind each token of it
    [TOKENS], and the CPU's logits there [TOKENS, vocab]."""
    prompt, cpu, metal = ids_of(shape.vocab, PROMPT), load(folder, "cpu"), load(folder)
    text = continued(cpu, cpu.new_sequence(), prompt, TOKENS, shape.vocab)
    ids = np.array([*prompt, *text[:-1]], np.int32)
    wanted = cpu.forward(cpu.new_sequence(), ids, all=True)[PROMPT - 1 :]
    sequence, sampler = metal.new_sequence(), sampler_of(shape.vocab)
    said = [int(metal.forward(sequence, prompt).argmax())]
    said += [metal.step(sequence, token, sampler) for token in text[:-1]]
    return metal, ids, said, wanted


def logits_behind(model: Any, ids: NDArray[np.int32]) -> NDArray[Any]:
    """Logits [TOKENS, vocab] behind the prompt and each token after it, by the kernels of few rows."""
    sequence = model.new_sequence()
    found = [model.forward(sequence, ids[:PROMPT])[None]]
    found += [model.forward(sequence, ids[at : at + 8], all=True) for at in range(PROMPT, len(ids), 8)]
    return np.concatenate(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_top_token_is_the_cpus_where_it_is_clear(tiny: Tiny, name: str) -> None:
    shape = all_chosen(SHAPES[name])
    metal, ids, said, wanted = beside_the_cpu(tiny(shape, "mlx-4bit-g64", dtype="bfloat16"), shape)
    found = logits_behind(metal, ids)
    np.testing.assert_array_equal(said, found.argmax(axis=1))  # a row of one has the bits of eight
    largest = np.abs(wanted).max(axis=1)
    assert (np.abs(found - wanted).max(axis=1) / largest).max() < DISTANCE
    second, first = np.sort(wanted, axis=1)[:, -2:].T
    clear = first - second > DISTANCE * largest
    assert clear.sum() > TOKENS // 2
    np.testing.assert_array_equal(np.array(said)[clear], wanted.argmax(axis=1)[clear])


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, s in SHAPES.items() if s.is_moe and s.top_k < s.experts])
def test_most_tokens_are_the_cpus_where_experts_are_chosen(tiny: Tiny, name: str) -> None:
    shape = SHAPES[name]
    _, _, said, wanted = beside_the_cpu(tiny(shape, "mlx-4bit-g64", dtype="bfloat16"), shape)
    assert np.mean(said == wanted.argmax(axis=1)) > SAME
