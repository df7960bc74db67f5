"""The draw on the device: the CPU sampler's filters and order, exact sums, chance by seed and position."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from metal_reference import METAL, Array, on_every_seed, quantised, run, structure
from numpy.typing import NDArray

BINS, SLICES = 1024, 64
PENALTIES, BIAS, MASK = 1, 2, 4


@dataclass(frozen=True)
class Options:
    """Settings of a row; defaults switch everything off but chance."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stream: int = 0
    adjust: int = 0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def structure(self) -> bytes:
        return structure(
            float(self.temperature), self.top_k, float(self.top_p), float(self.min_p),
            self.seed & 0xFFFFFFFF, self.seed >> 32, self.stream, self.adjust,
            float(self.repetition), float(self.presence), float(self.frequency),
        )  # fmt: skip


def order_keys(x: Array) -> NDArray[np.uint32]:
    """Unsigned numbers in the order of the floats; zeros are equal, NaN is above all."""
    x = np.where(x == 0, np.float32(0), x.astype(np.float32))
    bits = x.view(np.uint32)
    keys = np.where(bits >> 31 == 1, ~bits, bits | np.uint32(0x80000000))
    return np.where(np.isnan(x), np.uint32(0xFFFFFFFF), keys).astype(np.uint32)


def partials(logits: Array, size: int = 64) -> NDArray[np.uint32]:
    """What `head` leaves: the best (key, token) of every `size` logits."""
    rows, vocabulary = logits.shape
    groups = -(-vocabulary // size)
    keys = np.zeros((rows, groups * size), np.uint32)
    keys[:, :vocabulary] = order_keys(logits)
    keys = keys.reshape(rows, groups, size)
    tokens = keys.argmax(2) + np.arange(groups) * size
    return np.stack([keys.max(2), tokens], -1).astype(np.uint32)


class Drawing:
    """Buffers of a batch of rows; logits may be one row that all share."""

    def __init__(self, sim: Any, library: Any, logits: Array, options: list[Options], best: Any = None):
        self.sim, self.library, self.options = sim, library, options
        logits = np.atleast_2d(logits).astype(np.float32)
        self.vocabulary = logits.shape[1]
        rows = len(options)
        best = partials(logits) if best is None else best
        best = np.ascontiguousarray(np.broadcast_to(best, (rows, *best.shape[1:])))
        self.groups = best.shape[1]
        self.stride = 0 if len(logits) == 1 else self.vocabulary
        self.logits, self.best = sim.buffer(logits, "logits"), sim.buffer(best, "best")
        packed = np.frombuffer(b"".join(option.structure() for option in options), np.uint8)
        self.settings = sim.buffer(packed, "options")
        self.bins = sim.buffer(np.zeros((rows, 3 * (BINS + SLICES)), np.uint32), "bins")
        self.tokens, self.keys = sim.buffer(4 * rows, "tokens"), sim.buffer(4 * rows, "keys")
        self.positions = sim.buffer(np.zeros(rows, np.uint32), "positions")
        self.sequences = sim.buffer(np.arange(rows, dtype=np.uint32), "sequences")
        self.counts = sim.buffer(np.zeros((rows, self.vocabulary), np.uint32), "counts")

    def shape(self, advance: int = 1) -> bytes:
        return structure(self.vocabulary, self.stride, self.groups, 64, advance)

    def adjust(self, bias: Array, mask: Array) -> dict[str, Any]:
        arguments = {0: self.logits, 1: self.best, 2: self.settings, 3: self.sequences, 4: self.counts}
        arguments |= {5: self.sim.buffer(bias, "bias"), 6: self.sim.buffer(mask, "mask"), 7: self.shape()}
        groups = (-(-self.groups // 8), len(self.options))
        return {
            "library": self.library,
            "kernel": "adjust_logits",
            "arguments": arguments,
            "groups": groups,
            "group": 256,
        }

    def launches(self, advance: int = 1) -> list[dict[str, Any]]:
        first = {0: self.logits, 1: self.best, 2: self.settings, 3: self.bins, 4: self.shape()}
        second = {0: self.logits, 1: self.best, 2: self.settings, 3: self.bins, 4: self.tokens, 5: self.keys}
        second |= {6: self.positions, 7: self.sequences, 8: self.counts, 9: self.shape(advance)}
        rows, slices = len(self.options), -(-self.vocabulary // 4096)
        return [
            {
                "library": self.library,
                "kernel": "sample_bins",
                "arguments": first,
                "groups": (slices, rows),
                "group": 256,
            },
            {
                "library": self.library,
                "kernel": "sample",
                "arguments": second,
                "groups": rows,
                "group": 512,
            },
        ]

    def left_bins(self) -> NDArray[np.uint32]:
        """What a step leaves in its bins."""
        return self.bins.array(np.uint32, (len(self.options), 3 * (BINS + SLICES)))[:, : 3 * BINS]

    def draw(self, positions: Any = 0) -> NDArray[np.uint32]:
        """Tokens of a step at these positions."""
        self.positions.array(np.uint32)[:] = positions
        run(self.sim, *self.launches())
        return self.tokens.array(np.uint32).copy()


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python's integers."""
    c, (k0, k1), word = list(counter), key, 2**32 - 1
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & word, (a >> 32) ^ c[3] ^ k1, a & word]
        k0, k1 = k0 + 0x9E3779B9 & word, k1 + 0xBB67AE85 & word
    return c


def uniform(option: Options, position: int) -> float:
    """The number in [0, 1) that decides a row."""
    words = philox([position, option.stream, 0, 0], [option.seed & 0xFFFFFFFF, option.seed >> 32])
    return (words[0] * 2**32 + words[1]) / 2**64


def distribution(logits: Array, o: Options) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens from the most probable on, the lower of equals first, and their probabilities after filters.

    The k first; of them those of at least min_p times the best one's probability; of them the fewest whose
    mass reaches top_p times that of the k first: the order of the CPU sampler.
    """
    wide = logits.astype(np.float64)
    order = np.lexsort((np.arange(len(wide)), -wide))
    weights = np.exp((wide[order] - wide.max()) / np.float64(np.float32(o.temperature)))
    count = o.top_k or len(wide)
    order, weights = order[:count], weights[:count]
    total = weights.sum()
    keep = weights >= o.min_p
    order, weights = order[keep], weights[keep]
    if o.top_p < 1:
        reached = np.cumsum(weights)
        keep = np.concatenate([[True], reached[:-1] < np.float32(o.top_p) * total])
        order, weights = order[keep], weights[keep]
    return order, weights / weights.sum()


SETTINGS = [
    Options(),
    Options(temperature=0.6),
    Options(temperature=2.5),
    Options(top_k=1),
    Options(top_k=20),
    Options(top_k=5000),
    Options(top_p=0.9),
    Options(top_p=0.05),
    Options(top_p=0.0),
    Options(min_p=0.05),
    Options(min_p=1.0),
    Options(temperature=0.7, top_k=20, top_p=0.8),
    Options(temperature=0.6, top_k=20, top_p=0.95, min_p=0.02),
    Options(temperature=1.5, top_k=50, top_p=0.99, min_p=0.1),
    Options(temperature=0.01, top_p=0.5),
]


def expected_token(logits: Array, option: Options, position: int) -> int:
    """The first token, in the order of probability, whose running probability exceeds the random number."""
    order, probabilities = distribution(logits, option)
    place = np.searchsorted(np.cumsum(probabilities), uniform(option, position), side="right")
    return int(order[min(place, len(order) - 1)])


def test_the_generator_gives_the_published_numbers(sim: Any) -> None:
    """Known answers of Random123 for philox4x32-10."""
    library = sim.compile(
        '#include "common/philox.h"\n'
        "kernel void numbers(device const uint4* counters [[buffer(0)]],"
        " device const uint2* keys [[buffer(1)]], device uint4* out [[buffer(2)]],"
        " uint i [[thread_position_in_grid]]) { out[i] = philox(counters[i], keys[i]); }",
        include=[METAL],
    )
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    counters = np.array([[0] * 4, [2**32 - 1] * 4, pi], np.uint32)
    keys = np.array([[0] * 2, [2**32 - 1] * 2, [0xA4093822, 0x299F31D0]], np.uint32)
    out = sim.buffer(48, "out")
    with sim.encoder() as encoder:
        arguments = {0: sim.buffer(counters), 1: sim.buffer(keys), 2: out}
        encoder.dispatch(library, "numbers", arguments, threads=3, group=3)
    expected = [
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ]
    assert out.array(np.uint32, (3, 4)).tolist() == expected
    assert [philox(c.tolist(), k.tolist()) for c, k in zip(counters, keys, strict=True)] == expected


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_row_draws_the_token_that_its_random_number_names(
    sim: Any, kernels: Any, rng: Any, spread: float
) -> None:
    """All settings beside each other, at two positions: the inverse of the filtered distribution's sums."""
    logits = (spread * rng.standard_normal((len(SETTINGS), 400))).astype(np.float32)
    options = [Options(**(vars(o) | {"seed": 2**40 + i})) for i, o in enumerate(SETTINGS)]
    drawing = Drawing(sim, kernels("sample"), logits, options)
    for position in (0, 70_000):
        found = on_every_seed(sim, lambda at=position: drawing.draw(at))
        wanted = [expected_token(row, o, position) for row, o in zip(logits, options, strict=True)]
        assert found.tolist() == wanted
    assert drawing.positions.array(np.uint32).tolist() == [70_001] * len(SETTINGS)
    assert drawing.keys.array(np.uint32).tolist() == order_keys(logits.max(1)).tolist()
    assert not drawing.left_bins().any(), "bins aren't empty for the next step"


def test_a_draw_depends_on_seed_and_position_alone(sim: Any, kernels: Any, rng: Any) -> None:
    logits = rng.standard_normal((4, 300)).astype(np.float32)
    options = [Options(seed=5, top_p=0.97), Options(seed=6), Options(temperature=0.0), Options(seed=5)]
    together = Drawing(sim, kernels("sample"), logits, options).draw([3, 4, 5, 6])
    for row in range(4):
        alone = Drawing(sim, kernels("sample"), logits[row], options[row : row + 1])
        assert alone.draw(3 + row).tolist() == [together[row]]
    assert together[2] == logits[2].argmax()


def test_streams_and_positions_and_seeds_give_other_draws(sim: Any, kernels: Any) -> None:
    options = [Options(seed=s, stream=t) for s in (1, 2**32 + 1) for t in (0, 1)]
    drawing = Drawing(sim, kernels("sample"), np.zeros(512, np.float32), options)
    found = np.concatenate([drawing.draw(position) for position in (0, 1, 2)])
    assert len(set(found.tolist())) == 12


@pytest.mark.parametrize("option", [Options(top_k=3), Options(top_p=0.5), Options(temperature=0.0)])
def test_lower_tokens_come_first_among_equals(sim: Any, kernels: Any, option: Options) -> None:
    """Six equal logits, zeros of both signs: three of them stay, or the first."""
    logits = np.full(200, -80, np.float32)
    logits[[150, 9, 63, 64, 65, 190]] = [0.0, -0.0, 0.0, -0.0, 0.0, 0.0]
    options = [Options(**(vars(option) | {"seed": seed})) for seed in range(60)]
    found = set(Drawing(sim, kernels("sample"), logits, options).draw().tolist())
    assert found == ({9} if option.temperature == 0 else {9, 63, 64})


def test_nan_shows_in_the_key_and_no_allowed_token_too(sim: Any, kernels: Any) -> None:
    logits = np.zeros((3, 130), np.float32)
    logits[0, 77] = np.nan
    logits[1] = -np.inf
    logits[2, 5:] = -np.inf
    drawing = Drawing(sim, kernels("sample"), logits, [Options(seed=8)] * 3)
    found = drawing.draw()
    assert drawing.keys.array(np.uint32)[:2].tolist() == [0xFFFFFFFF, 0x007FFFFF]
    assert found[0] == 77
    assert found[2] < 5
    assert not drawing.left_bins().any()


def chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    """The statistic in standard deviations from its mean; draws are right if it is a few at most."""
    expected = counts.sum() * probabilities
    statistic = float(np.sum((counts - expected) ** 2 / expected))
    freedom = len(counts) - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


def fast(sim: Any) -> Any:
    """The kernels without the checker, for many draws."""
    sim.configure(checks=False)
    return sim.compile(METAL / "sample.metal", include=[METAL])


@pytest.mark.parametrize(
    "option",
    [
        Options(),
        Options(temperature=0.5),
        Options(top_k=6, top_p=0.9),
        Options(min_p=0.2),
        Options(top_p=0.7, min_p=0.1),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(sim: Any, option: Options) -> None:
    logits = np.random.default_rng(2).standard_normal(12).astype(np.float32)
    options = [Options(**(vars(option) | {"seed": seed})) for seed in range(500)]
    drawing = Drawing(sim, fast(sim), logits, options)
    found = np.concatenate([drawing.draw(position) for position in range(4)])
    order, probabilities = distribution(logits, option)
    counts = Counter(found.tolist())
    assert set(counts) <= set(order.tolist())
    assert abs(chi_square(np.array([counts[t] for t in order.tolist()]), probabilities)) < 4


@pytest.mark.parametrize(
    "option",
    [
        Options(temperature=4.0),
        Options(temperature=4.0, top_k=1025),
        Options(temperature=4.0, top_k=1700, top_p=0.8),
        Options(temperature=4.0, top_p=0.9),
        Options(temperature=4.0, min_p=0.2),
        Options(temperature=4.0, top_p=0.95, min_p=0.17),
    ],
    ids=str,
)
def test_more_tokens_than_are_sorted_follow_the_distribution_too(sim: Any, option: Options) -> None:
    """Over a thousand tokens remain: cuts by passes over the row. Equal logits lie on both sides of a cut."""
    rng = np.random.default_rng(4)
    logits = (np.round(rng.standard_normal(3001) * 8) / 4).astype(np.float32)
    options = [Options(**(vars(option) | {"seed": seed})) for seed in range(100)]
    drawing = Drawing(sim, fast(sim), logits, options)
    found = np.concatenate([drawing.draw(position) for position in range(8)])
    order, probabilities = distribution(logits, option)
    assert len(order) > 1024
    assert set(found.tolist()) <= set(order.tolist())
    counts = np.bincount(found, minlength=3001)[order]
    # Tokens of small expectation together, so that the statistic is that of a chi-square.
    buckets = np.arange(len(order)) // 16
    assert abs(chi_square(np.bincount(buckets, counts).astype(int), np.bincount(buckets, probabilities))) < 4


@pytest.mark.parametrize("size", [1023, 1024, 1025])
def test_both_ways_agree_where_they_meet(sim: Any, kernels: Any, size: int) -> None:
    """As many equal logits as are sorted at most, or one more; the cut keeps the lower half."""
    logits = np.full(1400, -50, np.float32)
    logits[200 : 200 + size] = 1.0
    options = [Options(top_p=0.5, seed=seed) for seed in range(24)]
    drawing = Drawing(sim, kernels("sample"), logits, options)
    found = on_every_seed(sim, drawing.draw)
    assert found.min() >= 200
    assert found.max() < 200 + (size + 1) // 2
    assert len(set(found.tolist())) > 16


@pytest.mark.parametrize("top_k", [1024, 1025, 1300])
def test_a_cut_among_equal_logits_keeps_the_lower_tokens(sim: Any, kernels: Any, top_k: int) -> None:
    """1,400 equal logits, drawn from the first k, and from the two that a tiny top-p leaves."""
    options = [Options(top_k=top_k, seed=seed) for seed in range(30)]
    drawing = Drawing(sim, kernels("sample"), np.zeros(1400, np.float32), options)
    found = drawing.draw()
    assert found.max() < top_k
    assert found.max() > top_k // 2
    least = [Options(top_k=top_k, top_p=1.5 / top_k, seed=seed) for seed in range(8)]
    assert set(Drawing(sim, kernels("sample"), np.zeros(1400, np.float32), least).draw().tolist()) == {0, 1}


def test_head_and_draw_are_one_pass(sim: Any, kernels: Any, rng: Any) -> None:
    """Logits and partial choices as `head` leaves them: three launches, a greedy row among them."""
    weights = quantised(rng, 333, 64, 16)
    x = rng.normal(0, 3, (3, 64)).astype(np.float32)
    options = [Options(temperature=0.8, top_p=0.9, seed=21), Options(temperature=0.0), Options(seed=22)]
    drawing = Drawing(sim, kernels("sample"), np.zeros((3, 333), np.float32), options)
    arguments = weights.arguments(sim) | {3: sim.buffer(x, "input"), 4: sim.buffer(np.ones(64, np.float32))}
    arguments |= {5: sim.buffer(np.arange(3, dtype=np.uint32)), 6: drawing.logits, 7: sim.buffer(4 * x.size)}
    arguments |= {8: drawing.best, 9: structure(3, 64, 333, 5, 1e-6, 1, drawing.groups)}
    first = {"kernel": "head_b16_m4", "arguments": arguments, "groups": drawing.groups, "group": 256}
    sim.reset_counters()
    run(sim, {"library": kernels("head")} | first, *drawing.launches())
    assert sim.counters()["dispatches"] == sim.counters()["stages"] == 3
    logits = drawing.logits.array(np.float32, (3, 333))
    wanted = [expected_token(row, o, 0) for row, o in zip(logits[[0, 2]], options[::2], strict=True)]
    assert drawing.tokens.array(np.uint32).tolist() == [wanted[0], logits[1].argmax(), wanted[1]]


@pytest.mark.parametrize(
    ("option", "vocabulary"),
    [
        (Options(), 8191),  # a token less than two slices
        (Options(temperature=0.3), 8193),
        (Options(top_k=30), 8193),
        (Options(top_p=0.2, temperature=0.5), 12_288),
    ],
    ids=str,
)
def test_several_slices(sim: Any, kernels: Any, rng: Any, option: Options, vocabulary: int) -> None:
    """The best tokens lie in the last slice; without a cut draws fall in each of them in proportion."""
    logits = rng.standard_normal(vocabulary).astype(np.float32)
    logits[-20:] += 2
    options = [Options(**(vars(option) | {"seed": seed})) for seed in range(12)]
    drawing = Drawing(sim, kernels("sample"), logits, options)
    found = on_every_seed(sim, drawing.draw)
    order, probabilities = distribution(logits, option)
    if len(order) <= 1024:
        assert found.tolist() == [expected_token(logits, o, 0) for o in options]
        return
    of_token = np.zeros(vocabulary)
    of_token[order] = probabilities
    shares = np.add.reduceat(of_token, np.arange(0, vocabulary, 4096))
    drawn = [int(np.searchsorted(np.cumsum(shares), uniform(o, 0), side="right")) for o in options]
    assert (found // 4096).tolist() == drawn


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", [Options(top_k=20, top_p=0.95), Options(temperature=0.7, top_p=0.9, min_p=0.001)], ids=str
)
def test_the_whole_vocabulary(sim: Any, kernels: Any, option: Options) -> None:
    """248,320 logits like a model's: the token that the random number names, schedule by schedule."""
    rng = np.random.default_rng(7)
    logits = (rng.standard_normal(248_320) * 2.2).astype(np.float32)
    logits[rng.integers(0, 248_320, 300)] += rng.exponential(4, 300).astype(np.float32)
    options = [Options(**(vars(option) | {"seed": seed})) for seed in range(3)]
    drawing = Drawing(sim, kernels("sample"), logits, options)
    found = on_every_seed(sim, drawing.draw)
    assert found.tolist() == [expected_token(logits, o, 0) for o in options]


@pytest.mark.slow
def test_the_whole_vocabulary_without_filters_is_drawn_in_proportion(sim: Any) -> None:
    """Total variation over ten classes of probability, at 248,320 logits and a high temperature."""
    logits = (np.random.default_rng(8).standard_normal(248_320) * 2.2).astype(np.float32)
    options = [Options(temperature=1.4, seed=seed) for seed in range(64)]
    drawing = Drawing(sim, fast(sim), logits, options)
    found = np.concatenate([drawing.draw(position) for position in range(10)])
    order, probabilities = distribution(logits, options[0])
    classes = np.minimum((np.cumsum(probabilities) * 10).astype(int), 9)
    of_token = np.empty(248_320, int)
    of_token[order] = classes
    expected = np.bincount(classes, probabilities, 10)
    assert abs(chi_square(np.bincount(of_token[found], minlength=10), expected)) < 4


@pytest.mark.parametrize(
    "option",
    [
        Options(),
        Options(temperature=0.6, top_k=20, top_p=0.95, min_p=0.02),
        Options(temperature=1.5, top_k=50, top_p=0.9, min_p=0.1),
        Options(top_p=0.3),
    ],
    ids=str,
)
def test_the_distribution_is_that_of_the_cpu_sampler(option: Options) -> None:
    """The formulas above, which the draws follow, are those of the sampler that other backends use."""
    core = pytest.importorskip("lily_py._core", reason="the native module isn't built")
    logits = (3 * np.random.default_rng(1).standard_normal(400)).astype(np.float32)
    one = core.Sampler(
        temperature=option.temperature, top_k=option.top_k, top_p=option.top_p, min_p=option.min_p,
        repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=[], seed=0,
        vocabulary=1 << 20,
    )  # fmt: skip
    found = one.distribution(logits)
    order, probabilities = distribution(logits, option)
    assert [token for token, _ in found] == order.tolist()
    np.testing.assert_allclose([p for _, p in found], probabilities, rtol=2e-5)


def test_penalties_bias_and_mask_change_logits_and_choices(sim: Any, kernels: Any, rng: Any) -> None:
    """Rows with each alone, with all, and with none: the bits of fp32 arithmetic, each operation rounded.

    Greedy, so that the choice shows the new partials.
    """
    vocabulary, rows = 333, 5
    logits = (2 * rng.standard_normal((rows, vocabulary))).astype(np.float32)
    counts = (rng.random((rows, vocabulary)) < 0.3) * rng.integers(1, 5, (rows, vocabulary))
    bias = rng.normal(0, 3, (rows, vocabulary)).astype(np.float32)
    allowed = rng.random((rows, vocabulary)) < 0.5
    padded = np.zeros((rows, -(-vocabulary // 32) * 32), np.uint8)
    padded[:, :vocabulary] = allowed
    mask = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    numbers = {"repetition": 1.3, "presence": 0.7, "frequency": 0.25, "temperature": 0.0}
    options = [Options(adjust=a, **numbers) for a in (PENALTIES, BIAS, MASK, PENALTIES | BIAS | MASK, 0)]

    def compute() -> Array:
        drawing = Drawing(sim, kernels("sample"), logits, options)
        drawing.counts.array(np.uint32, counts.shape)[:] = counts
        run(sim, drawing.adjust(bias, mask), *drawing.launches())
        counted = drawing.counts.array(np.uint32, counts.shape)
        found = drawing.tokens.array(np.uint32)
        for row, option in enumerate(options):
            more = np.zeros(vocabulary, int)
            more[found[row]] = int(option.adjust & PENALTIES > 0)
            assert (counted[row] == counts[row] + more).all()
        return np.concatenate([drawing.logits.array(np.float32), found.astype(np.float32)])

    found = on_every_seed(sim, compute)
    wanted = logits.copy()
    repetition, presence, frequency = np.float32(1.3), np.float32(0.7), np.float32(0.25)
    for row, option in enumerate(options):
        if option.adjust & PENALTIES:
            x = np.where(wanted[row] > 0, wanted[row] / repetition, wanted[row] * repetition)
            x -= presence + frequency * counts[row].astype(np.float32)
            wanted[row] = np.where(counts[row] > 0, x, wanted[row])
        if option.adjust & BIAS:
            wanted[row] += bias[row]
        if option.adjust & MASK:
            wanted[row][~allowed[row]] = -np.inf
    changed = found[: rows * vocabulary].reshape(rows, vocabulary)
    np.testing.assert_array_equal(changed, wanted)
    assert found[rows * vocabulary :].tolist() == changed.argmax(1).tolist()
