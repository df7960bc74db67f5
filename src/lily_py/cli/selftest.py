"""``lily selftest``: whether a GPU computes what the CPU does, as one report to paste.

Every kernel is compiled and made a pipeline. Then small random models of odd widths run on both backends,
operation by operation, with fp32 activations, where each result must be that of the CPU up to fp32
rounding; and as shipped, with bf16, where results must agree within its rounding.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
from numpy.typing import NDArray

import lily_py
from lily_py import _core
from lily_py.bench.shapes import ModelShape
from lily_py.bench.synthetic import make_checkpoint
from lily_py.checkpoint import open_checkpoint
from lily_py.errors import BackendError, LilyError
from lily_py.loader import load_model
from lily_py.sampling import SamplingOptions

Floats = NDArray[numpy.float32]

SHAPES = {
    "mixture": ModelShape(
        hidden=192, layers=4, heads=6, kv_heads=2, head_dim=64, key_heads=2, value_heads=6, gdn_dim=64,
        experts=12, top_k=3, moe_width=192, shared_width=320, vocab=1031,
    ),
    "dense": ModelShape(
        hidden=320, layers=4, heads=3, kv_heads=1, head_dim=256, key_heads=1, value_heads=3, gdn_dim=128,
        dense_width=448, vocab=1033, tied=True,
    ),
}  # fmt: skip
"""Head sizes of the family, widths that no tile divides."""

EXACT = 2e-4
"""Largest difference over the largest number, of an operation in fp32 after those before it."""
ROUNDED = 0.04
"""Root mean square of the difference over that of the numbers, of logits with bf16 activations."""
PROMPT = 70
"""Tokens: over the end of a page of the cache."""


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was compared.
        found: how far apart, or what went wrong.
        passed: whether that is allowed.
    """

    name: str
    found: str
    passed: bool

    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'FAIL'}  {self.name:<44} {self.found}"


def run(options: argparse.Namespace) -> int:
    """Print the report of ``lily selftest`` and return the exit status."""
    backend = _chosen(options.backend)
    print(f"lily {lily_py.__version__} selftest, {platform.platform()}, Python {platform.python_version()}")
    failed = []
    for check in _checks(backend):
        print(check, flush=True)
        if not check.passed:
            failed.append(check.name)
    print(f"selftest: {'passed' if not failed else 'FAILED: ' + ', '.join(failed)}")
    return 1 if failed else 0


def _chosen(backend: str) -> str:
    """Return the backend to test.

    Raises:
        BackendError: there is none beside the CPU's, which is what others are compared with.
    """
    others = [name for name in _core.backends() if name != "cpu"]
    if backend not in ("auto", *others) or not others:
        raise BackendError(
            f"there is nothing to test: this build has {' and '.join(_core.backends())}, and the CPU backend "
            "is what others are compared with"
        )
    chosen = others[0] if backend == "auto" else backend
    if problem := _core.backend_problem(chosen):
        raise BackendError(f"the {chosen} backend can't be used here: {problem}")
    return chosen


def _checks(backend: str) -> Iterator[Check]:
    for family, kernels, problem in _core.compile_kernels():
        yield Check(f"kernels of {family}", problem or f"{kernels} compiled", not problem)
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in SHAPES.items():
            path = make_checkpoint(shape, Path(folder) / name, progress=False)
            try:
                yield from _compare(name, shape, path, backend)
            except LilyError as error:
                yield Check(f"{name}: running it", str(error), False)


def _compare(name: str, shape: ModelShape, path: Path, backend: str) -> Iterator[Check]:
    checkpoint = open_checkpoint(path)
    cpu = load_model(checkpoint, kv_dtype="float32", ablate=("integer_dot",))
    exact = load_model(checkpoint, backend=backend, kv_dtype="float32", ablate=("bf16_activations",))
    yield Check(f"{name}: backend", exact.backend, True)
    ids = numpy.random.default_rng(1).integers(0, shape.vocab, PROMPT).astype(numpy.int32)
    sequences = [model.new_sequence() for model in (cpu, exact)]
    logits = [_forward(model, s, ids[:-1]) for model, s in zip((cpu, exact), sequences, strict=True)]
    yield _near(f"{name}: logits after {PROMPT - 1} tokens", logits[1], logits[0])
    yield from _operations(name, cpu, exact, sequences, int(ids[-1]))
    yield from _states(name, shape, sequences)
    yield from _rows(name, exact, ids)
    yield _decoded(name, shape, cpu, exact, ids)
    rounded = load_model(checkpoint, backend=backend)
    found = _forward(rounded, rounded.new_sequence(), ids[:-1])
    error = float(numpy.sqrt(numpy.mean((found - logits[0]) ** 2) / numpy.mean(logits[0] ** 2)))
    yield Check(f"{name}: logits as shipped", f"{error:.1e} of {ROUNDED:g}", error < ROUNDED)


def _operations(
    name: str, cpu: _core.Model, other: _core.Model, sequences: list[_core.Sequence], token: int
) -> Iterator[Check]:
    worst: dict[str, float] = {}
    traces = (cpu.trace(sequences[0], token), other.trace(sequences[1], token))
    for (operation, wanted), (_, found) in zip(*traces, strict=True):
        worst[operation] = max(worst.get(operation, 0.0), _distance(found, wanted))
    for operation, error in worst.items():
        yield Check(f"{name}: {operation}", f"{error:.1e} of {EXACT:g}", error < EXACT)


def _states(name: str, shape: ModelShape, sequences: list[_core.Sequence]) -> Iterator[Check]:
    attention = sum(shape.is_attention(layer) for layer in range(shape.layers))
    kinds = {
        "delta_rule: matrices": [
            tuple(s.recurrent_state(i) for s in sequences) for i in range(shape.layers - attention)
        ],
        "delta_rule: inputs": [
            tuple(s.conv_state(i) for s in sequences) for i in range(shape.layers - attention)
        ],
        "rotary_append: keys": [tuple(s.keys_values(i)[0] for s in sequences) for i in range(attention)],
        "rotary_append: values": [tuple(s.keys_values(i)[1] for s in sequences) for i in range(attention)],
    }
    for kind, pairs in kinds.items():
        error = max(_distance(found, wanted) for wanted, found in pairs)
        yield Check(f"{name}: {kind}", f"{error:.1e} of {EXACT:g}", error < EXACT)


def _rows(name: str, model: _core.Model, ids: NDArray[numpy.int32]) -> Iterator[Check]:
    """Yield whether 2, 4 and 8 rows have the bits of one, and many rows the numbers."""
    single = model.new_sequence()
    wanted = numpy.array([_forward(model, single, ids[i : i + 1]) for i in range(40)])
    for rows in (2, 3, 8):
        sequence = model.new_sequence()
        found = [_forward(model, sequence, ids[at : at + rows], every=True) for at in range(0, 24, rows)]
        same = numpy.array_equal(numpy.concatenate(found), wanted[:24])
        yield Check(f"{name}: {rows} rows at once", "equal bits" if same else "other bits", same)
    last = _forward(model, model.new_sequence(), ids[:40])
    yield _near(f"{name}: 40 rows at once", last, wanted[-1])


def _decoded(
    name: str, shape: ModelShape, cpu: _core.Model, other: _core.Model, ids: NDArray[numpy.int32]
) -> Check:
    """Return whether steps, ahead of their reader, say what the CPU says."""
    said = []
    for model in (cpu, other):
        sequence, sampler = (
            model.new_sequence(),
            SamplingOptions(temperature=0.0).make_sampler(0, shape.vocab),
        )
        tokens = [int(_forward(model, sequence, ids[:9]).argmax())]
        for _ in range(24):
            tokens.append(model.step(sequence, tokens[-1], sampler))
        said.append(tokens)
    same = sum(a == b for a, b in zip(*said, strict=True))
    return Check(f"{name}: greedy tokens", f"{same} of {len(said[0])} the CPU's", said[0] == said[1])


def _forward(
    model: _core.Model, sequence: _core.Sequence, ids: NDArray[numpy.int32], *, every: bool = False
) -> Floats:
    logits = model.forward(sequence, ids, all=every)
    assert logits is not None
    return logits


def _near(name: str, found: Floats, wanted: Floats) -> Check:
    error = _distance(found, wanted)
    return Check(name, f"{error:.1e} of {EXACT:g}", error < EXACT)


def _distance(found: Floats, wanted: Floats) -> float:
    largest = float(numpy.abs(wanted).max(initial=0.0)) or 1.0
    difference = numpy.abs(found.astype(numpy.float64) - wanted)
    return float(numpy.nan_to_num(difference, nan=numpy.inf).max(initial=0.0)) / largest
