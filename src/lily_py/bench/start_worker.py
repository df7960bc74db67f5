"""A fresh process up to its first token: ``python -m lily_py.bench.start_worker REQUEST``."""

from __future__ import annotations

import time

_BEGIN = time.perf_counter()

import json  # noqa: E402  (the imports are part of what is measured)
import sys  # noqa: E402

from lily_py.bench.lily_worker import greedy_sampler  # noqa: E402
from lily_py.bench.process import resident_bytes  # noqa: E402
from lily_py.bench.workload import prompt_ids  # noqa: E402
from lily_py.checkpoint import open_checkpoint  # noqa: E402
from lily_py.loader import load_model  # noqa: E402


def main() -> None:
    """Answer one request on standard output."""
    request = json.loads(sys.argv[1])
    imported = time.perf_counter()
    checkpoint = open_checkpoint(request["checkpoint"])
    model = load_model(checkpoint, threads=request["threads"])
    loaded = time.perf_counter()
    vocabulary = checkpoint.config.vocab_size
    logits = model.forward(model.new_sequence(), prompt_ids(request["prompt"], vocabulary))
    assert logits is not None
    greedy_sampler(vocabulary).draw(logits)
    first = time.perf_counter()
    seconds = {"imports": imported - _BEGIN, "load": loaded - imported, "prompt": first - loaded}
    print(json.dumps({"seconds": seconds, "memory": resident_bytes(), "weight_bytes": checkpoint.nbytes}))


if __name__ == "__main__":
    main()
