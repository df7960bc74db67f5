"""lily's arm: runs in a process of its own, ``python -m lily_py.bench.lily_worker REQUEST``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from lily_py import _core
from lily_py.bench.process import resident_bytes
from lily_py.bench.workload import Measured, Workload, digest_of, prompt_ids
from lily_py.checkpoint import open_checkpoint
from lily_py.loader import load_model

_WARM_UP_STEPS = 4
_WARM_UP_TOKENS = 2048
"""Longer prompts are computed in the same pieces as this many tokens."""


def greedy_sampler(vocabulary: int) -> _core.Sampler:
    """Return a sampler that takes the most probable token."""
    return _core.Sampler(
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logit_bias=(),
        seed=0,
        vocabulary=vocabulary,
    )


def measure(workload: Workload, ablate: Sequence[str] = ()) -> Measured:
    """Load the model, then for each context: a warm-up of the same shape, a prompt and its continuation.

    Args:
        ablate: optimisations to switch off.
    """
    start = time.perf_counter()
    checkpoint = open_checkpoint(workload.checkpoint)
    model = load_model(checkpoint, threads=workload.threads, ablate=ablate)
    measured = Measured(facts={"load_seconds": time.perf_counter() - start, "backend": model.backend})
    vocabulary = checkpoint.config.vocab_size
    for context in workload.contexts:
        warm_up = min(context, _WARM_UP_TOKENS)
        _request(model, warm_up, vocabulary, min(_WARM_UP_STEPS, workload.decode))
        prefill, decode, ids = _request(model, context, vocabulary, workload.decode)
        measured.prefill[context] = context / prefill
        measured.decode[context] = workload.decode / decode
        measured.digests[context] = digest_of(ids)
    measured.facts["memory"] = resident_bytes()
    return measured


def _request(model: _core.Model, context: int, vocabulary: int, steps: int) -> tuple[float, float, list[int]]:
    """Return seconds to the first token, seconds of the `steps` after it, and all their ids."""
    prompt = prompt_ids(context, vocabulary)
    sampler = greedy_sampler(vocabulary)
    sequence = model.new_sequence()
    start = time.perf_counter()
    logits = model.forward(sequence, prompt)
    assert logits is not None
    ids = [sampler.draw(logits)]
    first = time.perf_counter()
    for _ in range(steps):
        ids.append(model.step(sequence, ids[-1], sampler))
    return first - start, time.perf_counter() - first, ids


def main() -> None:
    """Answer one request on standard output."""
    request = json.loads(sys.argv[1])
    measured = measure(Workload.from_json(request["workload"]), request.get("ablate", ()))
    print(json.dumps(measured.as_json()))


if __name__ == "__main__":
    main()
