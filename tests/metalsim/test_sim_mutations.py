"""The checker is tested by breaking correct kernels: deleted barriers, weakened flags, moved indices.

Each mutant either is reported or gives a wrong result; those that do neither are equivalent programs, named
here with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from metalsim.msl.lexer import SourceError
from metalsim.simulator import SEEDS, Simulator
from metalsim_helpers import KERNELS, run_sort

Run = Callable[[Simulator, Path], bool]


@dataclass(frozen=True)
class Mutant:
    """A changed source: the file, what was changed, in which line."""

    file: str
    change: str
    line: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.change}"


def _sort(sim: Simulator, source: Path) -> bool:
    correct = True
    for bins in (200, 256):  # with room behind the last bin, and without
        keys = np.random.default_rng(0).integers(0, bins, 700, dtype=np.uint32)
        order = run_sort(sim, keys, bins, source=source)
        correct &= sorted(order) == list(range(700)) and bool((np.diff(keys[order].astype(int)) >= 0).all())
    return correct


def _attention(sim: Simulator, source: Path) -> bool:
    rng = np.random.default_rng(1)
    q = rng.normal(size=(2, 64)).astype(np.float32)
    k, v = (rng.normal(size=(2, 77, 64)).astype(np.float32) for _ in range(2))
    out, parameters = sim.buffer(q.nbytes, "out"), np.array([(77, 64, 0.125, 1)], "i4,i4,f4,i4")
    with sim.encoder() as encoder:
        encoder.dispatch(
            sim.compile(source),
            "attn_decode_f32_64",
            {0: sim.buffer(q, "q"), 1: sim.buffer(k, "k"), 2: sim.buffer(v, "v"), 3: out, 4: parameters},
            groups=2,
            group=128,
            constants={3: np.int32(0)},
            threadgroup_memory={0: 1024},
        )
    scores = np.einsum("hkd,hd->hk", k.astype(float), q) * 0.125
    weights = np.exp(scores - scores.max(1, keepdims=True))
    expected = np.einsum("hk,hkd->hd", weights / weights.sum(1, keepdims=True), v)
    return bool(np.abs(out.array(np.float32, (2, 64)) - expected).max() < 1e-5)


RUNS: dict[str, Run] = {"sort": _sort, "attn": _attention}

# Barriers that are deleted, and comparisons and indices that are moved by one.
CHANGES: list[tuple[str, str, str]] = [
    ("no barrier", r"threadgroup_barrier\(mem_flags::mem_threadgroup\);", ";"),
    ("barrier without memory", r"mem_flags::mem_threadgroup", "mem_flags::mem_none"),
    ("< becomes <=", r"(?<![<\w])(\w+) < (p\.bins|p\.n|p\.n_keys|PER|NSG)\b", r"\1 <= \2"),
    (">= becomes >", r"(\w+) >= (p\.n)\b", r"\1 > \2"),
    ("+ i becomes + i + 1", r"lane \* PER \+ i\]", "lane * PER + i + 1]"),
    ("another lane", r"lane == (0|31)\b", "lane == 5"),
    ("atomic becomes plain", r"atomic_fetch_add_explicit\(&local\[keys\[gid\]\], 1u, memory_order_relaxed\);",
     "((threadgroup uint*)local)[keys[gid]] += 1;"),
]  # fmt: skip

# Mutants that are correct programs all the same.
EQUIVALENT = {
    "attn:37:< becomes <=",  # the lane beyond the last has maximum -inf, so its weight is 0 either way
    "attn:31:another lane",  # all lanes hold the same maximum and sum
    "sort:11:< becomes <=",  # the grid has exactly n threads
    "sort:35:>= becomes >",
    "sort:10:barrier without memory",  # only atomics of one location meet there: those are coherent anyway
    "sort:12:barrier without memory",
}


def mutants() -> Iterator[Mutant]:
    for file in RUNS:
        text = (KERNELS / f"{file}.metal").read_text()
        for change, pattern, replacement in CHANGES:
            for match in re.finditer(pattern, text):
                if "host_name" in text[text.rfind("\n", 0, match.start()) : match.start()]:
                    continue
                changed = text[: match.start()] + match.expand(replacement) + text[match.end() :]
                yield Mutant(file, change, text.count("\n", 0, match.start()) + 1, changed)


@pytest.mark.parametrize("file", RUNS)
def test_original_is_correct_and_clean(seeded: Simulator, file: str) -> None:
    assert RUNS[file](seeded, KERNELS / f"{file}.metal")
    assert seeded.diagnostics() == []


@pytest.mark.parametrize("mutant", list(mutants()), ids=lambda m: m.name)
def test_mutant_is_found(sim: Simulator, mutant: Mutant, tmp_path: Path) -> None:
    source = tmp_path / f"{mutant.file}.metal"
    source.write_text(mutant.text)
    found = set()
    for seed in SEEDS:
        sim.configure(seed=seed)
        try:
            correct = RUNS[mutant.file](sim, source)
        except SourceError:
            return
        found |= {d.kind for d in sim.diagnostics()} | (set() if correct else {"wrong result"})
    assert bool(found) != (mutant.name in EQUIVALENT), found
