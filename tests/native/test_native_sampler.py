"""The sampler against the formulas of its parameters in NumPy, and its draws against their distribution."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sampling_support import chi_square, expected_distribution, sampler, softmax

from lily_py.errors import BackendError, InvalidArgumentError

Logits = NDArray[np.float32]


def logits_of(*values: float) -> Logits:
    return np.array(values, np.float32)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 1000])
def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equals(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(20):
        logits = rng.integers(-3, 4, size).astype(np.float32)
        assert sampler(temperature=0.0).draw(logits) == int(np.argmax(logits))


def test_greedy_ignores_filters_and_the_seed() -> None:
    logits = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    drawn = {sampler(temperature=0.0, top_k=5, top_p=0.1, min_p=0.9, seed=s).draw(logits) for s in range(20)}
    assert drawn == {int(np.argmax(logits))}


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.05},
    {"min_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 50, "top_p": 0.99, "min_p": 0.1},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_filtered_distributions_are_those_of_the_formulas(options: dict[str, Any], spread: float) -> None:
    logits = (spread * np.random.default_rng(1).standard_normal(400)).astype(np.float32)
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    expected = expected_distribution(logits, **full)
    found = sampler(**options).distribution(logits)
    assert [token for token, _ in found] == list(expected)
    np.testing.assert_allclose([p for _, p in found], list(expected.values()), rtol=2e-5)


@settings(max_examples=300, deadline=None)
@given(
    values=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.0, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_a_distribution_always_keeps_the_best_and_sums_to_one(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.array(values, np.float32)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    found = sampler(**options).distribution(logits)
    assert logits.max() - logits[found[0][0]] <= 1e-6  # nearer ones are equal as fp32 probabilities
    probabilities = [p for _, p in found]
    assert sum(probabilities) == pytest.approx(1, abs=1e-5)
    assert probabilities == sorted(probabilities, reverse=True)
    assert len({token for token, _ in found}) == len(found) <= (top_k or len(values))


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"top_k": 6, "top_p": 0.9}, {"min_p": 0.2}], ids=str
)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    logits = np.random.default_rng(2).standard_normal(12).astype(np.float32)
    one = sampler(seed=11, **options)
    expected = dict(one.distribution(logits))
    counts = Counter(one.draw(logits) for _ in range(40_000))
    assert set(counts) <= set(expected)
    tokens = sorted(expected)
    deviation = chi_square(np.array([counts[t] for t in tokens]), np.array([expected[t] for t in tokens]))
    assert abs(deviation) < 4, f"chi-square {deviation:.1f} standard deviations from its mean"


def test_first_draws_of_neighbouring_seeds_follow_the_distribution_too() -> None:
    logits = logits_of(0, 0, 0, 0, 0, 0, 0, 0)
    counts = np.bincount([sampler(seed=seed).draw(logits) for seed in range(20_000)], minlength=8)
    assert abs(chi_square(counts, np.full(8, 1 / 8))) < 4


def test_successive_draws_are_independent() -> None:
    one, logits = sampler(seed=3), logits_of(0, 0, 0, 0)
    drawn = np.array([one.draw(logits) for _ in range(40_000)])
    pairs = np.bincount(4 * drawn[:-1] + drawn[1:], minlength=16)
    assert abs(chi_square(pairs, np.full(16, 1 / 16))) < 5


def test_a_seed_repeats_its_draws_and_another_does_not() -> None:
    logits = np.random.default_rng(4).standard_normal(100).astype(np.float32)
    runs = [[one.draw(logits) for _ in range(50)] for one in (sampler(seed=s) for s in (7, 7, 8, 2**64 - 1))]
    assert runs[0] == runs[1]
    assert len({tuple(r) for r in runs}) == 3


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"),
    [(1.3, 0, 0), (0.8, 0, 0), (1, 0.7, 0), (1, 0, 0.4), (1.2, -0.5, 0.3)],
)
def test_penalties_are_those_of_the_formulas(repetition: float, presence: float, frequency: float) -> None:
    """Divided if positive, multiplied if not; then less presence, and frequency for each time it occurred."""
    logits = np.random.default_rng(5).standard_normal(30).astype(np.float32)
    prompt = np.array([1, 2, 2, 2, 9, 9, 17], np.int32)
    counts = np.bincount(prompt, minlength=30)
    expected = np.where(logits > 0, logits / repetition, logits * repetition) - presence - frequency * counts
    expected = np.where(counts > 0, expected, logits)
    one = sampler(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, seed=5
    )
    tokens = Counter()
    for seed in range(6000):
        one = sampler(
            repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, seed=seed
        )
        one.observe(prompt)
        tokens[one.draw(logits)] += 1
    found = np.array([tokens[i] for i in range(30)])
    assert abs(chi_square(found, softmax(expected.astype(np.float64)))) < 4


def greedy_choice(logits: Logits, **options: Any) -> int:
    return sampler(temperature=0.0, **options).draw(logits)


def test_penalties_count_what_was_drawn() -> None:
    one = sampler(temperature=0.0, frequency_penalty=1.0)
    assert [one.draw(logits_of(2.5, 1.2, 0.0)) for _ in range(5)] == [0, 0, 1, 0, 1]
    one = sampler(temperature=0.0, presence_penalty=1.0)
    assert [one.draw(logits_of(2.5, 2.0, 1.7)) for _ in range(4)] == [0, 1, 2, 0]
    one = sampler(temperature=0.0, repetition_penalty=2.0)
    assert [one.draw(logits_of(3.0, 2.0, -1.0)) for _ in range(3)] == [0, 1, 0]


def test_a_repetition_penalty_pushes_negative_logits_further_down() -> None:
    one = sampler(temperature=0.0, repetition_penalty=2.0)
    one.observe(np.array([0], np.int32))
    assert one.draw(logits_of(-1.0, -1.5, -3.0)) == 1


def test_observed_tokens_outside_the_vocabulary_change_nothing() -> None:
    one = sampler(temperature=0.0, presence_penalty=5.0)
    one.observe(np.array([-1, 3, 2**31 - 1], np.int32))
    assert one.draw(logits_of(0, 1, 0.5)) == 1


def test_logit_bias_is_added_and_can_forbid_or_force() -> None:
    logits = logits_of(1, 2, 3)
    assert greedy_choice(logits, logit_bias=[(0, 2.5)]) == 0
    assert greedy_choice(logits, logit_bias=[(2, -np.inf)]) == 1
    assert greedy_choice(logits, logit_bias=[(2, -100.0), (1, -100.0)]) == 0
    assert greedy_choice(logits, logit_bias=[(-1, 9.0), (3, 9.0), (2**31 - 1, 9.0)]) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_ids_beyond_the_vocabulary_are_never_drawn(temperature: float) -> None:
    logits = logits_of(0, 0, 0, 50, 50)
    drawn = {sampler(temperature=temperature, vocabulary=3, seed=s).draw(logits) for s in range(200)}
    assert drawn == ({0} if temperature == 0 else {0, 1, 2})


def test_a_mask_allows_only_its_tokens_until_it_is_lifted() -> None:
    one = sampler(temperature=0.0)
    logits = logits_of(1, 2, 3, 4)
    one.allow_only(np.array([1, 1, 0, 0], np.uint8))
    assert one.draw(logits) == 1
    one.allow_only(np.array([1], np.uint8))  # ids beyond a short mask are not allowed
    assert one.draw(logits) == 0
    one.allow_only(np.zeros(0, np.uint8))
    assert one.draw(logits) == 3


def test_no_token_left_is_an_error() -> None:
    one = sampler()
    one.allow_only(np.zeros(4, np.uint8))
    for logits in (logits_of(1, 2, 3, 4), np.full(4, -np.inf, np.float32)):
        with pytest.raises(InvalidArgumentError, match="no token"):
            one.draw(logits)
    one.allow_only(np.zeros(0, np.uint8))
    assert one.draw(logits_of(-np.inf, 1, -np.inf)) == 1
    with pytest.raises(InvalidArgumentError):
        sampler(vocabulary=0).draw(logits_of(1, 2))


@pytest.mark.parametrize("place", [0, 7, 16, 99])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_an_error_and_the_sampler_goes_on_afterwards(place: int, temperature: float) -> None:
    logits = np.random.default_rng(6).standard_normal(100).astype(np.float32)
    one, same = sampler(temperature=temperature, seed=9), sampler(temperature=temperature, seed=9)
    broken = logits.copy()
    broken[place] = np.nan
    with pytest.raises(BackendError, match="not numbers"):
        one.draw(broken)
    assert one.draw(logits) == same.draw(logits)


def test_infinities_of_both_signs_are_not_taken_for_nan() -> None:
    assert greedy_choice(logits_of(-np.inf, 1, np.inf, 2)) == 2


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits = (3 * np.random.default_rng(7).standard_normal(50)).astype(np.float32)
    expected = np.log(softmax(logits.astype(np.float64)))
    one = sampler(temperature=0.3, top_k=3, presence_penalty=2.0, logit_bias=[(4, 5.0)])
    one.observe(np.arange(10, dtype=np.int32))
    one.keep_log_probabilities(True)
    one.draw(logits)
    np.testing.assert_allclose([one.log_probability(i) for i in range(50)], expected, atol=2e-6)
    best = one.best(5)
    assert [token for token, _ in best] == np.argsort(-expected, kind="stable")[:5].tolist()
    np.testing.assert_allclose([value for _, value in best], np.sort(expected)[::-1][:5], atol=2e-6)
    assert len(one.best(1000)) == 50
    for token in (50, -1):
        with pytest.raises(InvalidArgumentError):
            one.log_probability(token)


def test_log_probabilities_of_changed_logits_are_those_of_the_logits_given_as_raw() -> None:
    raw, changed = logits_of(0, 1, 2), logits_of(9, 1, 2)
    one = sampler(temperature=0.0)
    one.keep_log_probabilities(True)
    assert one.draw(changed, raw) == 0
    expected = np.log(softmax(raw.astype(np.float64)))
    np.testing.assert_allclose([one.log_probability(i) for i in range(3)], expected, atol=1e-6)


def test_log_probabilities_are_not_there_unless_they_were_kept() -> None:
    one = sampler()
    one.draw(logits_of(1, 2))
    with pytest.raises(InvalidArgumentError, match="no log probabilities"):
        one.log_probability(0)


def test_no_logits_at_all_are_an_error() -> None:
    for temperature in (0.0, 1.0):
        with pytest.raises(InvalidArgumentError, match="no token"):
            sampler(temperature=temperature).draw(np.zeros(0, np.float32))


def test_at_temperature_zero_the_distribution_is_the_greedy_choice() -> None:
    assert sampler(temperature=0.0).distribution(logits_of(1, 3, 3, 2)) == [(1, 1.0)]


def test_the_best_tokens_are_drawable_ones() -> None:
    one = sampler(temperature=0.0, vocabulary=3)
    one.keep_log_probabilities(True)
    one.draw(logits_of(1, 3, 2, 9))
    assert [token for token, _ in one.best(10)] == [1, 2, 0]


# ---- draws, bit for bit


def random_number(seed: int, counter: int) -> int:
    """The number of a draw, in units of 2^-53: splitmix64 of the seed and of the draw's place."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    return mix(mix(seed) ^ mix(counter)) >> 11


def exponentials(x: Logits) -> Logits:
    """fp32, operation by operation: the series around the nearest multiple of ln 2, times a power of two."""
    f = np.float32
    n = np.rint(x * f(1.44269504))
    r = (x - n * f(0.693359375)) + n * f(2.12194440e-4)
    result = np.full_like(x, f(1) / f(5040))
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        result = result * r + f(1) / f(factorial)
    return np.ldexp(result, n.astype(np.int32))


def test_the_exponential_is_accurate() -> None:
    x = np.linspace(-49, 0, 200_001, dtype=np.float32)
    np.testing.assert_allclose(exponentials(x), np.exp(x.astype(np.float64)), rtol=2e-7)


def plain_draws(logits: Logits, seed: int, count: int, **options: Any) -> list[int]:
    """Everything sorted, most probable first and the lowest id among equals; integers, summed one by one."""
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "xtc_probability": 0.0} | options
    temperature, top_p, min_p = (np.float32(full[name]) for name in ("temperature", "top_p", "min_p"))
    top = logits.max()
    shares = np.zeros(len(logits), np.float32)
    near = logits >= top - np.float32(49) * temperature
    shares[near] = exponentials((logits[near] - top) * (np.float32(1) / temperature))
    order = np.argsort(-logits, kind="stable")[: full["top_k"] or len(logits)]
    order = np.sort(order[near[order]])
    order = order[np.argsort(-shares[order], kind="stable")]  # logits that differ may have equal shares
    whole = [int(share) for share in (shares[order].astype(np.float64) * 2**96).tolist()]
    kept = [i for i, share in enumerate(shares[order]) if share >= min_p]
    if top_p < 1:
        enough = -(-sum(whole) * int(float(top_p) * 2**53) // 2**53)
        reached = list(accumulate(whole[i] for i in kept))
        kept = kept[: next((i for i, sum_ in enumerate(reached) if sum_ >= enough), len(kept)) + 1]
    drawn = []
    for draw in range(count):
        left, counter = kept, draw
        if full["xtc_probability"]:
            counter = 2 * draw
            if random_number(seed, counter + 1) * 2.0**-53 < np.float32(full["xtc_probability"]):
                total = float(sum(whole[i] for i in kept)) * 2.0**-96
                high = [i for i in kept if np.float32(shares[order[i]] / total) >= np.float32(0.1)]
                left = kept[max(0, len(high) - 1) :]
        sums = list(accumulate(whole[i] for i in left))
        target = sums[-1] * random_number(seed, counter) // 2**53
        drawn.append(int(order[left[next(i for i, sum_ in enumerate(sums) if sum_ > target)]]))
    return drawn


EXACT_SETTINGS = [
    {},
    {"top_p": 0.95},
    {"top_p": 0.3, "temperature": 1.7},
    {"top_p": 0.0},
    {"top_k": 20},
    {"top_k": 3000, "top_p": 0.9},
    {"min_p": 0.2, "top_p": 0.9},
    {"min_p": 0.6, "top_p": 0.999},
    {"xtc_probability": 0.5, "top_p": 0.9},
    {"xtc_probability": 1.0, "temperature": 0.4},
]


@pytest.mark.parametrize("options", EXACT_SETTINGS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 300, 2047, 2048, 2049, 6000])
def test_draws_are_those_of_a_plain_sorted_search(size: int, options: dict[str, Any]) -> None:
    """Also where ties and rounding decide: each side of the size from which candidates are counted first."""
    rng = np.random.default_rng(size)
    for kind, logits in {
        "spread": 3 * rng.standard_normal(size),
        "flat": 1e-3 * rng.standard_normal(size),
        "equal": np.zeros(size),
        "ties": rng.integers(-2, 3, size),
        "far": rng.uniform(-200, 0, size),
    }.items():
        values = logits.astype(np.float32)
        one = sampler(seed=size, **options)
        found = [one.draw(values) for _ in range(6)]
        assert found == plain_draws(values, size, 6, **options), kind


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
def test_draws_from_a_whole_vocabulary_are_those_of_a_plain_sorted_search(spread: float) -> None:
    logits = (spread * np.random.default_rng(9).standard_normal(248_320)).astype(np.float32)
    one = sampler(seed=3, top_p=0.95)
    assert [one.draw(logits) for _ in range(3)] == plain_draws(logits, 3, 3, top_p=0.95)


@pytest.mark.parametrize("size", [4, 2048, 4096])
@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_top_p_keeps_no_token_more_than_reach_it(size: int, top_p: float) -> None:
    """Equal tokens of a power of two: their share reaches top_p exactly, and the lowest ids are kept."""
    kept = sampler(top_p=top_p).distribution(np.zeros(size, np.float32))
    assert sorted(token for token, _ in kept) == list(range(int(size * top_p)))


def test_an_infinite_logit_is_certain() -> None:
    for options in ({}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}):
        assert {sampler(seed=s, **options).draw(logits_of(1, np.inf, 2)) for s in range(20)} == {1}
