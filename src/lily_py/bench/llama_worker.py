"""llama.cpp's arm without `llama-bench`: llama-cpp-python in a process of its own."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from lily_py.bench.extras import require
from lily_py.bench.process import ArmError, resident_bytes
from lily_py.bench.workload import Measured, Workload, digest_of, prompt_ids

_WARM_UP_TOKENS = 2048


class LlamaModel:
    """A GGUF model in llama.cpp, through the C interface that llama-cpp-python binds.

    Args:
        path: the GGUF file.
        threads: compute threads.
        setting: ``repack``, ``flash_attention`` and ``batch`` as in `llama_cpp.Setting`.
    """

    def __init__(self, path: str, threads: int, setting: dict[str, Any]) -> None:
        self._api = api = require("llama_cpp")
        self._threads = threads
        self._setting = setting
        self._quiet = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._quiet, None)
        parameters = api.llama_model_default_params()
        parameters.use_extra_bufts = setting["repack"]
        self._model = api.llama_model_load_from_file(path.encode(), parameters)
        if not self._model:
            raise ArmError(f"{path}: llama.cpp can't load it")
        self.vocabulary = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model)))

    def request(self, context: int, steps: int) -> tuple[float, float, list[int]]:
        """Return seconds to the first token, seconds of the `steps` after it, and all ids (greedy)."""
        api = self._api
        parameters = api.llama_context_default_params()
        parameters.n_ctx = context + steps + 1
        parameters.n_batch = parameters.n_ubatch = self._setting["batch"]
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if self._setting["flash_attention"]
            else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        state = api.llama_init_from_model(self._model, parameters)
        if not state:
            raise ArmError(f"llama.cpp can't hold {context + steps + 1} tokens")
        try:
            prompt = prompt_ids(context, self.vocabulary).tolist()
            start = time.perf_counter()
            for begin in range(0, context, self._setting["batch"]):
                self._feed(state, prompt[begin : begin + self._setting["batch"]])
            ids = [self._best(state)]
            first = time.perf_counter()
            for _ in range(steps):
                self._feed(state, ids[-1:])
                ids.append(self._best(state))
            return first - start, time.perf_counter() - first, ids
        finally:
            api.llama_free(state)

    def _feed(self, state: Any, ids: list[int]) -> None:
        tokens = (self._api.llama_token * len(ids))(*ids)
        if self._api.llama_decode(state, self._api.llama_batch_get_one(tokens, len(ids))):
            raise ArmError("llama.cpp failed to compute a batch")

    def _best(self, state: Any) -> int:
        logits = self._api.llama_get_logits_ith(state, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self.vocabulary,))))


def measure(path: str, workload: Workload, setting: dict[str, Any]) -> Measured:
    """For each context: a warm-up, a prompt and its greedy continuation."""
    start = time.perf_counter()
    model = LlamaModel(path, workload.threads, setting)
    measured = Measured(facts={"load_seconds": time.perf_counter() - start})
    for context in workload.contexts:
        model.request(min(context, _WARM_UP_TOKENS), 1)
        prefill, decode, ids = model.request(context, workload.decode)
        measured.prefill[context] = context / prefill
        if workload.decode:
            measured.decode[context] = workload.decode / decode
        measured.digests[context] = digest_of(ids)
    measured.facts["memory"] = resident_bytes()
    return measured


def main() -> None:
    """Answer one request on standard output."""
    request = json.loads(sys.argv[1])
    measured = measure(request["file"], Workload.from_json(request["workload"]), request["setting"])
    print(json.dumps(measured.as_json()))


if __name__ == "__main__":
    main()
