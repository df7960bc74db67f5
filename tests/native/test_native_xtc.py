"""Exclude top choices: of the tokens that reach the threshold, all but the least probable are left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lily_py import _core


def sampler(**options: Any) -> _core.Sampler:
    values: dict[str, Any] = {
        "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": [], "seed": 0, "vocabulary": 64,
    }  # fmt: skip
    return _core.Sampler(**(values | options))


def expected(
    logits: NDArray[np.float32], temperature: float, top_k: int, threshold: float
) -> NDArray[np.float64]:
    """The distribution when the choice falls on excluding; no two logits are equal."""
    x = logits.astype(np.float64) / temperature
    if top_k:
        x[np.argsort(-x)[top_k:]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    reaching = np.flatnonzero((p >= threshold) & (p > 0))
    if len(reaching):
        keep = reaching[np.argmin(p[reaching])]
        p[reaching[reaching != keep]] = 0
    return p / p.sum()


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    spread=st.floats(0.1, 3),  # less than e^-49 of the best is never drawn
    threshold=st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.5, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5]),
)
def test_the_distribution_is_that_of_the_formula(
    seed: int, spread: float, threshold: float, temperature: float, top_k: int
) -> None:
    logits = (np.random.default_rng(seed).permutation(64) * spread / 8).astype(np.float32)
    reference = expected(logits, temperature, top_k, threshold)
    plain = expected(logits, temperature, top_k, 2.0)
    if threshold and np.abs(plain - threshold).min() < 1e-6:
        return  # on the edge, rounding decides
    drawn = sampler(
        temperature=temperature, top_k=top_k, xtc_probability=1.0, xtc_threshold=threshold
    ).distribution(logits)
    found = np.zeros(64)
    for token, probability in drawn:
        found[token] = probability
    np.testing.assert_allclose(found, reference, atol=1e-5)


def test_it_happens_as_often_as_its_probability_says() -> None:
    logits = np.array([3.0, 2.9, 0.0, -1.0], np.float32)
    one = sampler(xtc_probability=0.3, xtc_threshold=0.2, seed=7, vocabulary=4)
    draws = np.array([one.draw(logits) for _ in range(20_000)])
    plain, excluded = (expected(logits, 1.0, 0, threshold) for threshold in (2.0, 0.2))
    chance = 0.7 * plain + 0.3 * excluded
    counts = np.bincount(draws, minlength=4)
    chi_square = ((counts - 20_000 * chance) ** 2 / (20_000 * chance)).sum()
    assert chi_square < 16.3  # p = 0.001 with 3 degrees of freedom


def test_the_distribution_shown_is_the_one_the_next_draw_comes_from() -> None:
    logits = np.array([3.0, 2.9, 0.0, -1.0], np.float32)
    one = sampler(xtc_probability=0.5, xtc_threshold=0.2, seed=3, vocabulary=4)
    sizes = set()
    for _ in range(200):
        shown = dict(one.distribution(logits))
        sizes.add(len(shown))
        assert one.draw(logits) in shown
    assert sizes == {3, 4}


@pytest.mark.parametrize(
    "options", [{"xtc_probability": 0.0}, {"xtc_threshold": 0.6, "xtc_probability": 1.0}]
)
def test_switched_off_it_changes_no_draw(options: dict[str, Any]) -> None:
    logits = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    with_it, without = sampler(seed=5, **options), sampler(seed=5)
    if options["xtc_probability"] == 0.0:
        assert [with_it.draw(logits) for _ in range(200)] == [without.draw(logits) for _ in range(200)]
    assert with_it.distribution(logits)[:20] == without.distribution(logits)[:20]


def test_greedy_decoding_is_not_touched() -> None:
    logits = np.array([1.0, 3.0, 2.9], np.float32)
    assert sampler(temperature=0.0, xtc_probability=1.0, xtc_threshold=0.0, vocabulary=3).draw(logits) == 1


def test_words_of_bits_allow_what_a_mask_of_bytes_allows() -> None:
    rng = np.random.default_rng(1)
    logits = rng.standard_normal(100).astype(np.float32)
    for _ in range(50):
        mask = (rng.random(100) < 0.1).astype(np.uint8)
        mask[rng.integers(100)] = 1
        words = np.packbits(np.pad(mask, (0, 28)), bitorder="little").view(np.uint32)
        one, other = sampler(temperature=0.0, vocabulary=100), sampler(temperature=0.0, vocabulary=100)
        one.allow_only(mask)
        other.allow_bits(words)
        best = int(np.flatnonzero(mask)[np.argmax(logits[mask == 1])])
        assert one.draw(logits) == other.draw(logits) == best
