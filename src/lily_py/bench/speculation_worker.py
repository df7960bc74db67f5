"""Decodes with and without drafts, a process of its own: ``python -m lily_py.bench.speculation_worker``."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from lily_py.bench.speculation import TEXTS
from lily_py.bench.workload import prompt_ids
from lily_py.engine import Engine
from lily_py.sampling import SamplingOptions
from lily_py.speculation import DEFAULT_DRAFT_TOKENS, SPECULATIONS


def text_of(name: str, prompt: list[int], length: int, vocabulary: int) -> list[int]:
    """Return the tokens that follow a prompt."""
    fresh: list[int] = prompt_ids(length, vocabulary, first=1_000_003).tolist()
    copy = (prompt * (length // len(prompt) + 1))[:length]
    if name == "a copy of the prompt":
        return copy
    if name == "the prompt, edited":
        return [new if i % 25 == 24 else old for i, (old, new) in enumerate(zip(copy, fresh, strict=True))]
    if name == "matches by chance":
        return [token % 50 for token in fresh]
    return fresh


def decode(engine: Engine, prompt: list[int], text: list[int], most: int) -> tuple[float, dict[str, int]]:
    """Return the seconds of the text's tokens after the first one, and counts; with `most` drafts a pass."""
    model = engine._runtime.model
    state = engine._runtime.new_state()
    sampler = SamplingOptions(temperature=0.0).make_sampler(0, engine.info().vocabulary)
    speculation = SPECULATIONS["prompt_lookup"](most) if most else None
    state.restart(prompt)
    state.advance()
    state.tokens.append(text[0])
    passes, begun = model.passes, time.perf_counter()
    for i, token in enumerate(text[1:], 1):
        drafts = speculation.drafts(state.tokens, len(text) - 1 - i) if speculation else []
        state.step(sampler, drafts)
        state.tokens.append(token)
        if speculation:
            speculation.drawn(token)
    seconds = time.perf_counter() - begun
    counts = {"passes": model.passes - passes}
    if speculation:
        counts |= {"drafted": speculation.drafted, "accepted": speculation.accepted}
    return seconds, counts


def main() -> None:
    """Measure what the request on the command line asks for and print the result as JSON."""
    request = json.loads(sys.argv[1])
    found: dict[str, dict[str, Any]] = {}
    with Engine.load(request["checkpoint"], threads=request["threads"], cache_bytes=0) as engine:
        vocabulary = engine.info().vocabulary
        for name in TEXTS:
            alphabet = 50 if name == "matches by chance" else vocabulary
            prompt = prompt_ids(request["context"], alphabet).tolist()
            text = text_of(name, prompt, request["decode"] + 1, vocabulary)
            entry = found[name] = {"plain": [], "speculative": []}
            for repeat in range(-1, request["repeats"]):  # the first turn warms up
                plain, _ = decode(engine, prompt, text, 0)
                speculative, counts = decode(engine, prompt, text, DEFAULT_DRAFT_TOKENS)
                if repeat >= 0:
                    entry["plain"].append(plain)
                    entry["speculative"].append(speculative)
                    entry |= counts
    print(json.dumps(found))


if __name__ == "__main__":
    main()
