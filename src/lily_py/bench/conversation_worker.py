"""One arm of `conversation`: a process of its own, ``python -m lily_py.bench.conversation_worker REQUEST``.

Every turn sends the whole conversation again: what was sent before, the answer to it, and new tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lily_py.bench import llama_server
from lily_py.bench.llama_cpp import Setting, find_program
from lily_py.bench.workload import prompt_ids
from lily_py.engine import Engine

Ask = Callable[[list[int], int], tuple[list[int], float, int]]
"""(prompt, tokens to generate) -> (generated, seconds to the first, cached tokens of the prompt)."""

_WARM_UP_TOKENS = 256
_OTHER_TEXT = 1 << 30
"""Where the warm-up's tokens begin: nothing that the conversation could reuse."""


def converse(
    ask: Ask, vocabulary: int, turns: Sequence[int], grow: int, answer: int, *, reuse: bool
) -> dict[str, dict[int, float]]:
    """Return, for each of `turns`: seconds to the first token, the prompt's tokens, and those cached.

    Args:
        ask: answers a prompt.
        vocabulary: tokens are below.
        turns: that are measured.
        grow: tokens that a turn adds, its answer included.
        answer: tokens of an answer.
        reuse: go through all turns up to the last one measured; otherwise only those measured are asked,
            with prompts of the same lengths.
    """
    found: dict[str, dict[int, float]] = {"ttft": {}, "prompt": {}, "cached": {}}
    ask(prompt_ids(_WARM_UP_TOKENS, vocabulary, first=_OTHER_TEXT).tolist(), 2)
    history: list[int] = []
    for turn in range(1, max(turns) + 1) if reuse else turns:
        if reuse:
            first = turn * grow
            history += prompt_ids(grow - answer, vocabulary, first=first).tolist()
        else:
            history = prompt_ids(turn * grow - answer, vocabulary).tolist()
        generated, ttft, cached = ask(history, answer if reuse else 1)
        if turn in turns:
            found["ttft"][turn], found["prompt"][turn], found["cached"][turn] = ttft, len(history), cached
        history += generated
    return found


def _lily(request: dict[str, Any]) -> dict[str, dict[int, float]]:
    cache: dict[str, Any] = {} if request["reuse"] else {"cache_bytes": 0}
    with Engine.load(request["checkpoint"], threads=request["threads"], progress=False, **cache) as engine:

        def ask(prompt: list[int], count: int) -> tuple[list[int], float, int]:
            result = engine.generate(
                prompt, max_tokens=count, min_tokens=count, temperature=0, progress=False
            )
            return list(result.token_ids), result.timings.ttft, result.usage.cached_tokens

        return _converse(ask, request)


def _llama(request: dict[str, Any]) -> dict[str, dict[int, float]]:
    program = find_program("llama-server")
    assert program is not None
    context = max(request["turns"]) * request["grow"] + _WARM_UP_TOKENS
    setting = Setting.parse(request["setting"])
    command = llama_server.server_command(
        str(program), setting, Path(request["file"]), context, request["threads"]
    )
    with llama_server.running(command) as server:

        def ask(prompt: list[int], count: int) -> tuple[list[int], float, int]:
            completion = server.complete(prompt, count, reuse=request["reuse"])
            return completion.ids, completion.ttft, completion.cached

        return _converse(ask, request)


def _converse(ask: Ask, request: dict[str, Any]) -> dict[str, dict[int, float]]:
    names = ("vocabulary", "turns", "grow", "answer")
    return converse(ask, *[request[name] for name in names], reuse=request["reuse"])


def main() -> None:
    """Answer one request on standard output."""
    request = json.loads(sys.argv[1])
    arm = _lily if request["program"] == "lily" else _llama
    print(json.dumps(arm(request)))


if __name__ == "__main__":
    main()
