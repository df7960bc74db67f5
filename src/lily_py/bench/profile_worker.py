"""What operations take, in a process of its own: ``python -m lily_py.bench.profile_worker REQUEST``."""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict
from typing import Any

from lily_py import _core
from lily_py.bench.profile import operation_costs
from lily_py.bench.roofline import READ_BYTES, native_roofline
from lily_py.bench.workload import prompt_ids
from lily_py.checkpoint import open_checkpoint
from lily_py.errors import BackendError
from lily_py.loader import load_model
from lily_py.sampling import SamplingOptions


def measure(model: _core.Model, vocabulary: int, context: int, decode: int) -> list[dict[str, Any]]:
    """Return the costs of a prompt, and of a token after it; the same work goes before, to warm up."""
    for _ in range(2):
        sequence = model.new_sequence()
        sampler = SamplingOptions(temperature=0.0).make_sampler(0, vocabulary)
        counts, begin = model.counts, time.perf_counter()
        model.forward(sequence, prompt_ids(context, vocabulary))
        prefill = operation_costs(counts, model.counts, time.perf_counter() - begin)
        token = 1
        counts, begin = model.counts, time.perf_counter()
        for _ in range(decode):
            token = model.step(sequence, token, sampler)
        steps = operation_costs(counts, model.counts, time.perf_counter() - begin, decode)
    return [{name: asdict(cost) for name, cost in costs.items()} for costs in (prefill, steps)]


def read_bandwidth(threads: int) -> list[float]:
    """Return bytes per second of some repetitions; none if this build can't measure it."""
    try:
        return native_roofline().measure_read_bandwidth(READ_BYTES, threads, 0.2, 3)
    except BackendError:
        return []


def main() -> None:
    """Answer one request on standard output."""
    request = json.loads(sys.argv[1])
    checkpoint = open_checkpoint(request["checkpoint"])
    model = load_model(checkpoint, threads=request["threads"])
    phases: dict[str, dict[int, Any]] = {"prefill": {}, "decode": {}}
    bandwidth = read_bandwidth(request["threads"])
    for context in request["contexts"]:
        costs = measure(model, checkpoint.config.vocab_size, context, request["decode"])
        phases["prefill"][context], phases["decode"][context] = costs
    bandwidth += read_bandwidth(request["threads"])
    median = statistics.median(bandwidth) if bandwidth else 0.0
    print(json.dumps({"backend": model.backend, "bandwidth": median, **phases}))


if __name__ == "__main__":
    main()
