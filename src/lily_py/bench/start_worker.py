"""A fresh process up to its first token: ``python -m lily_py.bench.start_worker REQUEST``."""

from __future__ import annotations

import json
import sys
import time

from lily_py.bench.lily_worker import greedy_sampler
from lily_py.bench.process import resident_bytes
from lily_py.bench.workload import prompt_ids
from lily_py.checkpoint import open_checkpoint
from lily_py.loader import load_model


def main() -> None:
    """Answer one request on standard output; it says when the process was started (`time.time`)."""
    imported = time.time()
    request = json.loads(sys.argv[1])
    checkpoint = open_checkpoint(request["checkpoint"])
    model = load_model(checkpoint, threads=request["threads"])
    loaded = time.time()
    vocabulary = checkpoint.config.vocab_size
    logits = model.forward(model.new_sequence(), prompt_ids(request["prompt"], vocabulary))
    assert logits is not None
    greedy_sampler(vocabulary).draw(logits)
    first = time.time()
    seconds = {
        "imports": imported - request["started"],
        "load": loaded - imported,
        "prompt": first - loaded,
        "first token": first - request["started"],
    }
    print(json.dumps({"seconds": seconds, "memory": resident_bytes()}))


if __name__ == "__main__":
    main()
