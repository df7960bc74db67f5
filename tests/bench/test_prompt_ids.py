"""Prompts come from a fixed formula that neither repeats nor favours a part of the vocabulary."""

from __future__ import annotations

import itertools

import numpy as np

from lily_py.bench.workload import digest_of, mix32, prompt_ids


def test_the_mixing_function_is_murmurhash3s_finaliser() -> None:
    # Published vectors of MurmurHash3_x86_32 for empty input, where the hash is the finaliser of the seed.
    mixed = mix32(np.array([0, 1, 0xFFFFFFFF], np.uint32))
    assert mixed.tolist() == [0, 0x514E28B7, 0x81F16F39]


def test_a_token_is_the_mixed_position_scaled_to_the_vocabulary() -> None:
    assert prompt_ids(1, 248_320)[0] == 0x514E28B7 * 248_320 >> 32


def test_a_shorter_prompt_is_the_beginning_of_a_longer_one() -> None:
    assert np.array_equal(prompt_ids(128, 4096), prompt_ids(2048, 4096)[:128])


def test_prompts_that_start_elsewhere_continue_the_same_stream() -> None:
    assert np.array_equal(prompt_ids(10, 4096, first=90), prompt_ids(100, 4096)[90:])


def test_ids_cover_the_vocabulary_evenly() -> None:
    ids = prompt_ids(16_384, 248_320)
    assert ids.dtype == np.int32
    assert ids.min() >= 0
    assert ids.max() < 248_320
    assert len(set(ids.tolist())) > 15_700  # 16,384 even draws leave 15,856 distinct ids on average
    counts = np.bincount(ids // (248_320 // 16), minlength=16)
    assert counts.min() > 880  # 1,024 on average with a deviation of 31
    assert counts.max() < 1170


def test_no_short_pattern_repeats() -> None:
    ids = prompt_ids(4096, 248_320).tolist()
    pairs = set(itertools.pairwise(ids))
    assert len(pairs) == 4095


def test_the_digest_tells_sequences_apart() -> None:
    assert digest_of([1, 2, 3]) == digest_of((1, 2, 3))
    assert len({digest_of([1, 2, 3]), digest_of([1, 3, 2]), digest_of([1, 2]), digest_of([])}) == 4
