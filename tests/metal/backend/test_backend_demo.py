"""The demo model through `backend="metal"`, simulated, beside the CPU: text, sessions, streams, batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backend_support import continued, ids_of, state_bytes

QUESTIONS = ("What is the capital of France?", "Count from one to twenty.", "Tell me a story.")
RECURRENT, ATTENTION = 3, 1  # layers of the demo model


@pytest.fixture(scope="module")
def engines(metal_lily: ModuleType, loaded_simulator: Any) -> Iterator[tuple[Any, Any]]:
    """(metal, cpu); the kernels are the fast ones, without the checker."""
    loaded_simulator.configure(checks=False)
    metal = metal_lily.Engine.load("demo", backend="metal")
    cpu = metal_lily.Engine.load("demo", backend="cpu")
    yield metal, cpu
    metal.close()
    cpu.close()


def on_both(engines: tuple[Any, Any], prompt: Any, **keywords: Any) -> tuple[Any, Any]:
    return tuple(engine.generate(prompt, temperature=0, **keywords) for engine in engines)  # type: ignore


def drawn(engine: Any) -> dict[str, int]:
    return dict(engine._runtime.model.draws)


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_text_is_that_of_the_cpu(engines: tuple[Any, Any], question: str) -> None:
    metal, cpu = on_both(engines, question, max_tokens=70)
    assert metal.token_ids == cpu.token_ids
    assert metal.finish_reason == cpu.finish_reason


def test_greedy_tokens_are_chosen_on_the_device_a_step_ahead(engines: tuple[Any, Any]) -> None:
    """The first token comes from the prompt's logits; the other draws say where they were made."""
    before = drawn(engines[0])
    count = len(engines[0].generate(QUESTIONS[0], temperature=0, max_tokens=8).token_ids)
    after = drawn(engines[0])
    assert after.get("backend", 0) - before.get("backend", 0) == count - 1
    assert {name for name in after if name.startswith("host")} == {n for n in before if n.startswith("host")}


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"logprobs": True}, "host: log probabilities"),
        ({"logprobs": True, "repetition_penalty": 1.2}, "host: log probabilities"),
    ],
)
def test_what_needs_logits_is_drawn_by_the_host_and_says_so(
    engines: tuple[Any, Any], keywords: dict[str, Any], reason: str
) -> None:
    before = drawn(engines[0]).get(reason, 0)
    metal, cpu = on_both(engines, QUESTIONS[0], max_tokens=6, **keywords)
    assert metal.token_ids == cpu.token_ids
    assert drawn(engines[0])[reason] > before


@pytest.mark.parametrize(
    "keywords",
    [
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.5},
        {"logit_bias": {5: 1.0}},
        {"min_tokens": 12},
        {"regex": "[A-Z][a-z]{2,9} (is|was) [a-z]{1,6}"},
    ],
    ids=str,
)
def test_penalties_bias_and_tokens_left_out_are_the_devices(
    engines: tuple[Any, Any], keywords: dict[str, Any]
) -> None:
    before = drawn(engines[0])
    metal, cpu = on_both(engines, QUESTIONS[2], max_tokens=20, **keywords)
    assert metal.token_ids == cpu.token_ids
    assert drawn(engines[0])["backend"] - before.get("backend", 0) == len(metal.token_ids) - 1
    assert {name: count for name, count in drawn(engines[0]).items() if name != "backend"} == {
        name: count for name, count in before.items() if name != "backend"
    }


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_step_that_nobody_takes_leaves_no_trace(engines: tuple[Any, Any], steps: int) -> None:
    """A step is under way when the reader leaves; what was computed beyond the tokens is taken back."""
    model, prompt = engines[0]._runtime.model, ids_of(1000, 6)
    left = model.new_sequence()
    said = continued(model, left, prompt, 1 + steps, 1000)
    left.snapshot()
    assert left.tokens == [*prompt.tolist(), *said[:-1]]
    fresh = model.new_sequence()
    for at in range(0, left.length, 8):
        model.forward(fresh, np.array(left.tokens[at : at + 8], np.int32))
    assert state_bytes(left, RECURRENT, ATTENTION) == state_bytes(fresh, RECURRENT, ATTENTION)


def test_conversations_go_on_as_on_the_cpu(engines: tuple[Any, Any], tmp_path: Path) -> None:
    """Turns, rewinding, forks, and a saved session, which another backend refuses."""
    answers: list[list[Any]] = [[], []]
    for engine, found in zip(engines, answers, strict=True):
        session = engine.new_session()
        found.append(session.generate(QUESTIONS[0], temperature=0, max_tokens=20).token_ids)
        fork = session.fork()
        found.append(session.generate("And of Spain?", temperature=0, max_tokens=20).token_ids)
        session.rewind(len(session) - 3)
        found.append(session.generate(temperature=0, max_tokens=10).token_ids)
        found.append(fork.generate("Why?", temperature=0, max_tokens=10).token_ids)
        name = tmp_path / engine._runtime.model.backend.split()[0]
        fork.save(name)
        loaded = engine.load_session(name)
        found.append(loaded.generate("Go on.", temperature=0, max_tokens=10).token_ids)
        assert found[-1] == fork.generate("Go on.", temperature=0, max_tokens=10).token_ids
    assert answers[0] == answers[1]
    with pytest.raises(Exception, match=r"backend .metal. \(saved\) and .cpu."):
        engines[1].load_session(tmp_path / "metal")


def test_two_streams_in_turns_say_what_each_says_alone(engines: tuple[Any, Any]) -> None:
    metal, cpu = engines
    streams = [metal.stream(question, temperature=0, max_tokens=30) for question in QUESTIONS[:2]]
    said: list[list[int]] = [[], []]
    for chunks in zip_longest(*streams):
        for tokens, chunk in zip(said, chunks, strict=True):
            tokens.extend(chunk.token_ids if chunk else ())
    for question, tokens in zip(QUESTIONS, said, strict=False):
        assert tuple(tokens) == cpu.generate(question, temperature=0, max_tokens=30).token_ids


def test_answers_in_a_batch_are_those_of_the_cpu(engines: tuple[Any, Any]) -> None:
    metal, cpu = (
        [each.token_ids for each in (result, *result.others)]
        for result in on_both(engines, QUESTIONS[2], n=3, max_tokens=12)
    )
    assert metal == cpu


def test_a_seed_gives_the_same_draws_alone_and_in_company(engines: tuple[Any, Any]) -> None:
    metal, _ = engines
    options = {"temperature": 3.0, "top_k": 200, "top_p": 0.98, "max_tokens": 12}
    alone = [metal.generate(QUESTIONS[2], seed=seed, **options).token_ids for seed in (1, 2)]
    assert metal.generate(QUESTIONS[2], seed=1, **options).token_ids == alone[0] != alone[1]
    streams = [metal.stream(QUESTIONS[2], seed=seed, **options) for seed in (1, 2)]
    together: list[list[int]] = [[], []]
    for chunks in zip_longest(*streams):
        for tokens, chunk in zip(together, chunks, strict=True):
            tokens.extend(chunk.token_ids if chunk else ())
    assert [tuple(tokens) for tokens in together] == alone


@pytest.mark.parametrize("sizes", [(1, 2, 3, 4, 5, 6, 7, 8), (9, 27), (36,)])
def test_a_prompt_in_pieces_gives_the_logits_of_the_whole(
    engines: tuple[Any, Any], sizes: tuple[int, ...]
) -> None:
    """Eight rows and fewer share one arithmetic; the kernels of many rows round differently."""
    model = engines[0]._runtime.model
    ids = ids_of(1000, sum(sizes))
    pieces, at = model.new_sequence(), 0
    for size in sizes:
        logits = model.forward(pieces, ids[at : at + size])
        at += size
    single = model.new_sequence()
    for token in ids:
        wanted = model.forward(single, np.array([token], np.int32))
    if max(sizes) <= 8:
        np.testing.assert_array_equal(logits, wanted)
    else:
        np.testing.assert_allclose(logits, wanted, atol=0.05 * np.abs(wanted).max())


def test_what_the_engine_is_is_described(engines: tuple[Any, Any]) -> None:
    assert "of weights read into its memory" in engines[0]._runtime.model.backend
