"""mlx-lm's arm: runs in a process of its own, ``python -m lily_py.bench.mlx_worker REQUEST``."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from lily_py.bench.extras import require
from lily_py.bench.process import resident_bytes
from lily_py.bench.workload import Measured, Workload, digest_of, prompt_ids
from lily_py.checkpoint import open_checkpoint


def measure(workload: Workload, dtype: str) -> Measured:
    """Run the workload with mlx-lm's own generator on its CPU device.

    Args:
        dtype: ``"bf16"`` as published, or ``"f32"``: all floating-point tensors cast, faster on x86.
    """
    mx = require("mlx.core")
    generate = require("mlx_lm.generate")
    utils = require("mlx.utils")
    mx.set_default_device(mx.cpu)
    start = time.perf_counter()
    model, config = require("mlx_lm.utils").load_model(open_checkpoint(workload.checkpoint).folder)
    if dtype == "f32":

        def cast(array: Any) -> Any:
            return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array

        model.update(utils.tree_map(cast, model.parameters()))
    mx.eval(model.parameters())
    measured = Measured(facts={"load_seconds": time.perf_counter() - start})
    vocabulary = int(config.get("text_config", config)["vocab_size"])

    def request(context: int, steps: int) -> tuple[float, float, list[int]]:
        prompt = mx.array(prompt_ids(context, vocabulary))
        begin = time.perf_counter()
        ids, first = [], begin
        for token, _ in generate.generate_step(prompt, model, max_tokens=steps + 1):
            ids.append(int(token))
            if len(ids) == 1:
                first = time.perf_counter()
        return first - begin, time.perf_counter() - first, ids

    request(min(4, *workload.contexts), 2)
    for context in workload.contexts:
        prefill, decode, ids = request(context, workload.decode)
        measured.prefill[context] = context / prefill
        if workload.decode:
            measured.decode[context] = workload.decode / decode
        measured.digests[context] = digest_of(ids)
    measured.facts["memory"] = resident_bytes()
    return measured


def main() -> None:
    """Answer one request on standard output."""
    request = json.loads(sys.argv[1])
    measured = measure(Workload.from_json(request["workload"]), request["dtype"])
    print(json.dumps(measured.as_json()))


if __name__ == "__main__":
    main()
