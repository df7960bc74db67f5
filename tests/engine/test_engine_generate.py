"""What `generate` draws: greedy and sampled answers, ends, bans, penalties, log probabilities."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from engine_support import END, EXACT, IDS, Script, Tiny, copy_with, ids_of, load, scripted
from oracles.mlx_oracle import MlxOracle
from oracles.reference import Reference

import lily_py

NO_END = dict.fromkeys((END, IDS["<|endoftext|>"]), -math.inf)


@pytest.mark.parametrize("oracle", [Reference, MlxOracle])
@pytest.mark.parametrize(
    ("shape", "fmt"), [("moe_tied", "mlx-4bit-g64"), ("dense", "mlx-8bit-g32"), ("gdn_ratio4", "mlx")]
)
def test_greedy_answer_is_that_of_the_oracles(
    tiny: Tiny, shape: str, fmt: str, oracle: type[Reference] | type[MlxOracle]
) -> None:
    path = tiny(shape, fmt)
    prompt = ids_of(23, seed=1)
    with load(path, **EXACT) as engine:
        answer = engine.generate(prompt, temperature=0, max_tokens=40, logit_bias=NO_END).token_ids
        vocabulary = engine.info().vocabulary
    # By induction over positions, one pass over the whole text proves each choice.
    logits = oracle(path).forward([*prompt, *answer]).logits[len(prompt) - 1 : -1].copy()
    logits[:, [*NO_END, *range(vocabulary, logits.shape[1])]] = -np.inf
    assert list(answer) == logits.argmax(-1).tolist()


def test_prefill_and_decode_step_give_the_oracles_logits(exact: lily_py.Engine, folder: Path) -> None:
    ids = ids_of(70, seed=2)
    expected = Reference(folder).forward(ids).logits
    logits = [exact.prefill(ids[:64]), *(exact.decode_step(token) for token in ids[64:])]
    assert logits[0].dtype == np.float32
    assert logits[0].shape == (320,)
    np.testing.assert_allclose(np.stack(logits), expected[63:], rtol=0, atol=1e-4)


def test_prefill_starts_anew_and_reports_progress(engine: lily_py.Engine) -> None:
    ids = ids_of(1200)
    seen: list[tuple[int, int]] = []
    first = engine.prefill(ids, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (1200, 1200)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert len(seen) > 1
    engine.decode_step(5)
    np.testing.assert_array_equal(engine.prefill(ids), first)


@pytest.mark.parametrize("length", [1, 7, 64, 65, 511, 512, 513, 1026, 1027])
def test_b25_prefill_that_starts_later_than_zero_gives_the_same_logits(
    engine: lily_py.Engine, length: int
) -> None:
    ids = ids_of(length, seed=length)
    whole = engine.prefill(ids)
    for first in {1, length // 2, length - 1, min(length, 512)} - {0, length}:
        engine.prefill(ids[:first])
        with engine.new_session() as session:
            session.append(ids[:first])
            session.append(ids[first:])
            np.testing.assert_array_equal(session.logits(), whole)
    if length <= 65:
        engine.prefill(ids[:1])
        steps = [engine.decode_step(token) for token in ids[1:]]
        np.testing.assert_array_equal((steps or [whole])[-1], whole)


def test_b11_padded_ids_are_never_sampled(tiny: Tiny) -> None:
    # The head has 320 rows, the tokenizer fewer entries.
    with load(tiny("moe_tied", "mlx-4bit-g64")) as engine:
        entries = engine.info().vocabulary
        assert entries < 320
        for temperature in (0, 1, 10):
            result = engine.generate(
                ids_of(9), temperature=temperature, top_k=0, top_p=1, max_tokens=50,
                logit_bias={**NO_END, **dict.fromkeys(range(entries, 320), 1000.0)},
            )  # fmt: skip
            assert len(result.token_ids) == 50
            assert max(result.token_ids) < entries
        # In a prompt they are harmless, and have no text.
        assert engine.detokenize([319]) == ""
        assert engine.generate([319, 318], max_tokens=2).usage.prompt_tokens == 2


@pytest.mark.parametrize(
    ("in_config", "in_generation", "in_tokenizer"),
    [
        ("<|endoftext|>", ["<|im_end|>", "<|endoftext|>"], "<|im_end|>"),
        (["<|endoftext|>"], "<|endoftext|>", "<|im_end|>"),
        (["<|endoftext|>", "<|im_end|>"], ..., "<|endoftext|>"),
        (..., "<|im_end|>", "<|endoftext|>"),
    ],
)
def test_b12_any_end_token_of_any_file_ends_the_turn(
    folder: Path, tmp_path: Path, in_config: object, in_generation: object, in_tokenizer: str
) -> None:
    def ids(names: object) -> object:
        if isinstance(names, list):
            return [IDS[name] for name in names]
        return IDS[names] if isinstance(names, str) else names

    changed = copy_with(
        folder, tmp_path / "ends",
        config={"eos_token_id": ids(in_config)},
        generation_config={"eos_token_id": ids(in_generation)},
        tokenizer_config={"eos_token": in_tokenizer},
    )  # fmt: skip
    with load(changed) as engine:
        for end in ("<|im_end|>", "<|endoftext|>"):
            script = Script([*engine.tokenize("hi"), IDS[end], *engine.tokenize("never")])
            result = engine.generate(ids_of(5), logits_processors=[script])
            assert (result.text, result.finish_reason) == ("hi", "stop")
            assert result.token_ids[-1] == IDS[end]


def test_b17_same_seed_same_text_other_seed_other_text(engine: lily_py.Engine) -> None:
    def draw(seed: int | None) -> tuple[int, ...]:
        return engine.generate(ids_of(12), seed=seed, temperature=1, max_tokens=32).token_ids

    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in range(8)}) == 8
    assert len({draw(None) for _ in range(8)}) == 8


def test_b17_the_seed_that_was_drawn_is_told_and_repeats_the_answer(engine: lily_py.Engine) -> None:
    first = engine.generate(ids_of(12), temperature=1, max_tokens=32)
    again = engine.generate(ids_of(12), temperature=1, max_tokens=32, seed=first.seed)
    assert again.token_ids == first.token_ids


def test_b17_without_a_seed_two_processes_differ(folder: Path) -> None:
    code = (
        "import sys, lily_py; e = lily_py.Engine.load(sys.argv[1], threads=1); "
        "print(e.generate([1, 2, 3], temperature=1, max_tokens=32).token_ids)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(outputs) == 2


def test_b17_a_stream_beside_it_changes_nothing(engine: lily_py.Engine) -> None:
    alone = engine.generate(ids_of(12), seed=3, temperature=1, max_tokens=24).token_ids
    mine = engine.stream(ids_of(12), seed=3, temperature=1, max_tokens=24)
    other = engine.stream(ids_of(30, seed=9), seed=3, temperature=1, max_tokens=24)
    for _ in zip(mine, other, strict=False):
        pass
    assert mine.finish().token_ids == alone


def test_b18_edge_values_mean_what_they_should(engine: lily_py.Engine) -> None:
    prompt = ids_of(10)
    greedy = engine.generate(prompt, temperature=0, max_tokens=12).token_ids
    plain = engine.generate(prompt, seed=5, temperature=1, top_k=0, top_p=1, max_tokens=12).token_ids
    assert engine.generate(prompt, temperature=1e-9, max_tokens=12).token_ids == greedy
    assert engine.generate(prompt, temperature=1000, top_k=1, max_tokens=12).token_ids == greedy
    assert engine.generate(prompt, temperature=1000, top_p=0, top_k=0, max_tokens=12).token_ids == greedy
    assert engine.generate(prompt, temperature=1000, min_p=1, top_k=0, max_tokens=12).token_ids == greedy
    for top_k in (320, 321, 10**6):
        wide = engine.generate(prompt, seed=5, temperature=1, top_k=top_k, top_p=1, max_tokens=12).token_ids
        assert wide == plain
    # Prompts of one token, with every penalty on.
    result = engine.generate(
        [3], repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, max_tokens=3
    )
    assert result.usage.prompt_tokens == 1


def test_sampled_tokens_follow_the_models_distribution(engine: lily_py.Engine) -> None:
    prompt = ids_of(10)
    logits = engine.prefill(prompt).astype(np.float64)[: engine.info().vocabulary]
    keep = np.argsort(-logits, kind="stable")[:5]
    expected = np.exp((logits[keep] - logits[keep].max()) / 0.8)
    expected /= expected.sum()
    draws = 2000
    counts = Counter(
        engine.generate(prompt, temperature=0.8, top_k=5, top_p=1, max_tokens=1, seed=seed).token_ids[0]
        for seed in range(draws)
    )
    assert set(counts) <= set(keep.tolist())
    # Chi-square with 4 degrees of freedom: 18.5 is exceeded once in a thousand times.
    chi_square = sum(
        (counts[int(t)] - draws * p) ** 2 / (draws * p) for t, p in zip(keep, expected, strict=True)
    )
    assert chi_square < 18.5


def test_penalties_count_the_prompt_too(engine: lily_py.Engine) -> None:
    prompt = ids_of(10)
    logits = engine.prefill(prompt)[: engine.info().vocabulary]
    best = int(logits.argmax())
    for options in ({"presence_penalty": 50.0}, {"frequency_penalty": 50.0}, {"repetition_penalty": 100.0}):
        result = engine.generate([best, *prompt], temperature=0, max_tokens=20, logit_bias=NO_END, **options)
        assert best not in result.token_ids, options
        assert len(set(result.token_ids)) == 20, options


def test_max_tokens_cuts_and_says_length(engine: lily_py.Engine) -> None:
    result = engine.generate(ids_of(10), max_tokens=5, logit_bias=NO_END)
    assert (len(result.token_ids), result.finish_reason) == (5, "length")
    assert result.usage.completion_tokens == 5


def test_without_max_tokens_the_answer_may_fill_the_context(folder: Path) -> None:
    with load(folder, max_context=64) as engine:
        result = engine.generate(ids_of(10), logit_bias=NO_END)
        assert (len(result.token_ids), result.finish_reason) == (54, "length")


def test_min_tokens_holds_the_end_back(engine: lily_py.Engine) -> None:
    eager = {END: 1000.0}
    assert engine.generate(ids_of(10), logit_bias=eager, temperature=0).token_ids == (END,)
    result = engine.generate(ids_of(10), logit_bias=eager, temperature=0, min_tokens=4)
    assert len(result.token_ids) == 5
    assert result.token_ids.index(END) == 4
    assert result.finish_reason == "stop"


def test_n_answers_are_those_of_successive_seeds(engine: lily_py.Engine) -> None:
    keywords = {"temperature": 1, "max_tokens": 12}
    result = engine.generate(ids_of(30), n=3, seed=40, **keywords)
    assert len(result.choices) == 3
    assert result.choices[0] is result
    for i, choice in enumerate(result.choices):
        assert choice.token_ids == engine.generate(ids_of(30), seed=40 + i, **keywords).token_ids
    assert [choice.usage.cached_tokens for choice in result.choices] == [0, 29, 29]
    with pytest.raises(lily_py.InvalidArgumentError, match="n must be 1 for a stream"):
        engine.stream(ids_of(3), n=2)


def test_logprobs_are_the_models_own(exact: lily_py.Engine, folder: Path) -> None:
    prompt = ids_of(15)
    result = exact.generate(
        prompt, seed=1, temperature=0.3, top_k=3, repetition_penalty=1.5, max_tokens=10, top_logprobs=4,
        logit_bias={**NO_END, 7: 2.0},
    )  # fmt: skip
    logits = Reference(folder).forward([*prompt, *result.token_ids]).logits[len(prompt) - 1 : -1]
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
    for row, entry in zip(expected, result.logprobs, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=2e-4)
        assert len(entry.top) == 4
        values = [other.logprob for other in entry.top]
        assert values == sorted(values, reverse=True)
        drawable = row[: exact.info().vocabulary]
        np.testing.assert_allclose(values, np.sort(drawable)[::-1][:4], atol=2e-4)
        assert entry.text == exact.detokenize([entry.token_id], skip_special=False)


def test_b20_logprobs_are_the_same_streamed_or_not_and_for_every_position(engine: lily_py.Engine) -> None:
    keywords = {"seed": 3, "max_tokens": 20, "top_logprobs": 3, "logit_bias": NO_END}
    whole = engine.generate(ids_of(20), **keywords)
    with engine.stream(ids_of(20), **keywords) as stream:
        streamed = [entry for chunk in stream for entry in chunk.logprobs]
    assert tuple(streamed) == whole.logprobs == stream.result.logprobs
    assert len({entry.top for entry in streamed}) > 10
    assert engine.generate(ids_of(20), seed=3, max_tokens=2).logprobs is None


def test_logits_processors_see_all_tokens_and_decide(engine: lily_py.Engine) -> None:
    seen: list[list[int]] = []

    def favour_42(tokens: list[int], logits: np.ndarray) -> np.ndarray:
        seen.append(tokens)
        logits[42] = 1e6
        return logits

    result = engine.generate([1, 2], logits_processors=[favour_42], max_tokens=3, logprobs=True)
    assert result.token_ids == (42, 42, 42)
    assert seen == [[1, 2], [1, 2, 42], [1, 2, 42, 42]]
    # Log probabilities stay the model's.
    assert result.logprobs is not None
    assert all(entry.logprob < -0.01 for entry in result.logprobs)


def test_logits_processor_that_fails_leaves_the_engine_usable(engine: lily_py.Engine) -> None:
    def broken(_: list[int], logits: np.ndarray) -> np.ndarray:
        return logits[:-1]

    with pytest.raises(lily_py.InvalidArgumentError, match=r"logits_processors.*shape"):
        engine.generate([1, 2], logits_processors=[broken])
    assert engine.generate([1, 2], max_tokens=3, logit_bias=NO_END).usage.completion_tokens == 3


def test_banning_everything_is_an_error_not_a_hang(engine: lily_py.Engine) -> None:
    with pytest.raises(lily_py.InvalidArgumentError, match="no token is allowed"):
        engine.generate([1, 2], logit_bias=dict.fromkeys(range(320), -math.inf))
    engine.generate([1, 2], max_tokens=1)


def test_result_reads_well(engine: lily_py.Engine) -> None:
    text = "a long answer " * 10
    result = engine.generate(ids_of(5), logits_processors=scripted(engine, text))
    assert str(result) == result.text == text
    assert "\n" not in repr(result)
    assert len(repr(result)) < 120
    assert result.usage.total_tokens == 5 + len(text) + 1
    assert result.timings.ttft > 0
    assert result.timings.peak_memory_bytes > 1 << 20
    assert result.timings.decode_tokens_per_second > 0
    assert result.timings.prefill_tokens_per_second > 0
