"""Penalties, bias and masks where the GPU picks the token: it picks what the host would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from backend_support import ids_of, load, sampler_of
from oracles.shapes import SHAPES

SHAPE = replace(SHAPES["moe"], layers=4)
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.15}
BIAS: dict[str, Any] = {"logit_bias": ((3, 2.5), (40, -float("inf")), (77, 1.25))}


@pytest.fixture(scope="module")
def model(metal_lily: ModuleType, loaded_simulator: Any, tiny: Callable[..., Path]) -> Any:
    loaded_simulator.configure(checks=False)
    return load(tiny(SHAPE, "mlx-4bit-g64", dtype="bfloat16"))


class Twins:
    """A sequence whose tokens the GPU picks, and one whose logits go to the host."""

    def __init__(self, model: Any, prompt: Any, **options: Any) -> None:
        self.model = model
        self.on_gpu, self.on_host = model.new_sequence(), model.new_sequence()
        self.sampler, self.twin = (sampler_of(SHAPE.vocab - 9, **options) for _ in range(2))
        for sequence, sampler in ((self.on_gpu, self.sampler), (self.on_host, self.twin)):
            model.forward(sequence, prompt)
            sampler.observe(prompt)

    def host(self, token: int) -> int:
        return int(self.twin.draw(self.model.forward(self.on_host, np.array([token], np.int32))))

    def steps(self, token: int, count: int) -> list[int]:
        """Tokens that both pick, one step after the other."""
        tokens = []
        for _ in range(count):
            wanted = self.host(token)
            token = self.model.step(self.on_gpu, token, self.sampler)
            assert token == wanted
            tokens.append(token)
        return tokens


@pytest.mark.parametrize("options", [PENALTIES, BIAS, PENALTIES | BIAS, {"frequency_penalty": -0.5}], ids=str)
def test_greedy_choices_are_those_of_the_host(model: Any, options: dict[str, Any]) -> None:
    """Steps ahead of their reader: what the GPU counts is what the host would count."""
    before = model.draws.get("backend", 0)
    prompt = ids_of(SHAPE.vocab, 12)
    tokens = Twins(model, prompt, **options).steps(5, 30)
    assert model.draws["backend"] - before == 30
    assert tokens != Twins(model, prompt).steps(5, 30)


def test_what_penalties_cost(model: Any) -> None:
    """Head and choice; with chance a histogram more; with penalties the change of logits too."""
    launches = []
    for options in ({}, {"temperature": 1.0}, PENALTIES):
        sequence, sampler = model.new_sequence(), sampler_of(SHAPE.vocab - 9, **options)
        before = model.counts["launches"]
        model.step_each([sequence], [5], [sampler])
        launches.append(model.counts["launches"] - before)
    everything = 3 * 6 + 8 + 3
    assert launches == [everything, everything + 1, everything + 2]


def test_counts_go_on_through_whatever_happens_to_the_sequence(model: Any) -> None:
    """A step that nobody takes, tokens that are counted besides, a batch, and a draw by the host."""
    twins = Twins(model, ids_of(SHAPE.vocab, 12), **PENALTIES)
    tokens = twins.steps(5, 3)
    twins.on_gpu.snapshot()
    tokens += twins.steps(tokens[-1], 2)
    for sampler in (twins.sampler, twins.twin):
        sampler.observe(np.array([1, 2, 3, tokens[0]] * 3, np.int32))
    tokens += twins.steps(tokens[-1], 3)
    other, its = model.new_sequence(), sampler_of(SHAPE.vocab - 9, **PENALTIES)
    for _ in range(3):
        wanted = twins.host(tokens[-1])
        drawn = model.step_each(
            [other, twins.on_gpu], np.array([7, tokens[-1]], np.int32), [its, twins.sampler]
        )
        assert drawn[1] == wanted
        tokens.append(wanted)
    tokens += twins.steps(tokens[-1], 3)
    wanted = twins.host(tokens[-1])
    logits = model.forward(twins.on_gpu, np.array([tokens[-1]], np.int32))
    assert twins.sampler.draw(logits) == wanted
    twins.steps(wanted, 3)


def test_two_requests_in_turns_keep_their_own_counts(model: Any) -> None:
    twins = [Twins(model, ids_of(SHAPE.vocab, 9, seed=seed), **PENALTIES) for seed in range(6)]
    tokens = [1 + i for i in range(6)]
    for _ in range(4):
        tokens = [each.steps(token, 1)[0] for each, token in zip(twins, tokens, strict=True)]
    sequences, samplers = [each.on_gpu for each in twins], [each.sampler for each in twins]
    for _ in range(4):
        wanted = [each.host(token) for each, token in zip(twins, tokens, strict=True)]
        tokens = model.step_each(sequences, np.array(tokens, np.int32), samplers)
        assert tokens == wanted


def test_draws_with_penalties_have_the_distribution_of_the_host(model: Any) -> None:
    """Draws of 320 seeds at one position, eight in a pass, with repeated tokens and a bias."""
    options = PENALTIES | BIAS | {"temperature": 1.5, "top_k": 4}
    prompt = np.repeat(ids_of(SHAPE.vocab, 9), 3)
    first = model.new_sequence()
    model.forward(first, prompt)
    first.snapshot()
    logits = model.forward(first, np.array([3], np.int32))
    host = sampler_of(SHAPE.vocab - 9, **options | {"temperature": 0.0})
    host.observe(prompt)
    adjusted = logits.copy()
    for token in set(prompt.tolist()):
        count, x = np.float32((prompt == token).sum()), adjusted[token]
        x = x / np.float32(1.3) if x > 0 else x * np.float32(1.3)
        adjusted[token] = x - (np.float32(0.4) + np.float32(0.15) * count)
    for token, bias in BIAS["logit_bias"]:
        adjusted[token] += np.float32(bias)
    adjusted[SHAPE.vocab - 9 :] = -np.inf
    assert host.draw(logits) == int(adjusted.argmax())
    plain = sampler_of(SHAPE.vocab - 9, temperature=1.5, top_k=4)
    wanted = dict(plain.distribution(adjusted))
    first.truncate(len(prompt))
    sequences = [first.fork() for _ in range(8)]
    for sequence in sequences:
        sequence.snapshot()
    counts = dict.fromkeys(wanted, 0)
    for batch in range(40):
        samplers = [sampler_of(SHAPE.vocab - 9, 8 * batch + i, **options) for i in range(8)]
        for sampler in samplers:
            sampler.observe(prompt)
        for token in model.step_each(sequences, np.full(8, 3, np.int32), samplers):
            counts[token] += 1
        for sequence in sequences:
            sequence.truncate(len(prompt))
    expected = 320 * np.array(list(wanted.values()))
    found = np.array(list(counts.values()))
    statistic = float(np.sum((found - expected) ** 2 / expected))
    assert statistic < 16.3  # chi square of three degrees of freedom at 0.1 %


def test_masks_leave_out_tokens(model: Any) -> None:
    """A mask of its own for each token, then none: where the steps may run ahead again."""
    twins = Twins(model, ids_of(SHAPE.vocab, 12), **PENALTIES)
    before, rng, token = dict(model.draws), np.random.default_rng(0), 5
    for _ in range(6):
        mask = (rng.random(SHAPE.vocab - 20) < 0.2).astype(np.uint8)
        twins.sampler.allow_only(mask)
        twins.twin.allow_only(mask)
        token = twins.steps(token, 1)[0]
        assert mask[token]
    for sampler in (twins.sampler, twins.twin):
        sampler.allow_only(np.zeros(0, np.uint8))
    twins.steps(token, 4)
    assert model.draws["backend"] - before.get("backend", 0) == 10


@pytest.mark.parametrize("together", [False, True])
def test_no_token_allowed_is_said_to_whom_it_concerns(
    metal_lily: ModuleType, model: Any, together: bool
) -> None:
    nothing = tuple((token, -float("inf")) for token in range(SHAPE.vocab))
    refusing, greedy = sampler_of(SHAPE.vocab, logit_bias=nothing), sampler_of(SHAPE.vocab)
    first, second = model.new_sequence(), model.new_sequence()
    for sequence in (first, second):
        model.forward(sequence, ids_of(SHAPE.vocab, 4))

    def step() -> None:
        if together:
            model.step_each([second, first], np.array([1, 1], np.int32), [greedy, refusing])
        else:
            model.step(first, 1, refusing)

    with pytest.raises(metal_lily.InvalidArgumentError, match="no token is allowed"):
        step()
    assert first.length == 5
    token, fresh = model.step(first, 2, greedy), model.new_sequence()
    model.forward(fresh, np.array(first.tokens[:5], np.int32))
    assert token == int(model.forward(fresh, np.array([2], np.int32)).argmax())
