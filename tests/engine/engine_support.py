"""Engines on tiny checkpoints, and ways to make a random model say what a test needs."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from oracles import textfiles

import lily_py
from lily_py.sampling import LogitsProcessor

Logits = NDArray[np.float32]
Tiny = Callable[..., Path]
Keywords = dict[str, Any]

IDS = textfiles.token_ids()
END = IDS["<|im_end|>"]
EXACT: dict[str, Any] = {"kv_dtype": "float32", "ablate": ("integer_dot",), "threads": 1}
"""Nothing is rounded on purpose: what the oracles, which compute in floating point, are compared with."""


DEFAULTS: dict[str, Any] = {"threads": 1}
"""Options of every engine, unless a test says otherwise; tests/metal/backend sets others in its copy."""


def load(folder: Path, **options: Any) -> lily_py.Engine:
    return lily_py.Engine.load(folder, **(DEFAULTS | options))


def copy_with(folder: Path, target: Path, **changes: dict[str, Any]) -> Path:
    """A checkpoint copied, keys of its JSON files changed: `config={"eos_token_id": 3}` (... drops it)."""
    shutil.copytree(folder, target)
    for name, keys in changes.items():
        path = target / f"{name}.json"
        values = json.loads(path.read_text())
        values.update(keys)
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    return target


def ids_of(length: int, seed: int = 0) -> list[int]:
    """A prompt of random tokens, none of them a control token."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, length)]


def scripted(engine: lily_py.Engine, text: str, *, end: bool = True) -> list[LogitsProcessor]:
    """Logits processors that make the model write `text`, then end its turn.

    Control tokens in the text are written as such; all other text one byte a token, so that every string and
    every character of several bytes is cut to pieces.
    """
    return [Script([*spelled(engine, text), *([END] if end else [])])]


def spelled(engine: lily_py.Engine, text: str) -> list[int]:
    """The tokens of a text: control tokens as such, all else byte by byte."""
    byte_ids = {byte: id for id, byte in enumerate(range(256))}
    symbols = textfiles.byte_symbols()
    vocabulary = textfiles.vocabulary()
    tokens: list[int] = []
    while text:
        control = next((name for name in IDS if text.startswith(name)), None)
        if control is not None:
            tokens.append(IDS[control])
            text = text[len(control) :]
        else:
            for byte in text[0].encode():
                tokens.append(vocabulary[symbols[byte_ids[byte]]])
            text = text[1:]
    return tokens


class Script:
    """A logits processor that makes one token after the other certain."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.left = list(tokens)

    def __call__(self, _: list[int], logits: Logits) -> Logits:
        forced = np.full_like(logits, -1e9)
        forced[self.left.pop(0)] = 0
        return forced


def flip(path: Path, place: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def altered(folder: Path, target: Path) -> Path:
    """A copy of a checkpoint in which one byte of the last tensor differs, as after a fine-tuning."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    weights = max(target.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    flip(weights, weights.stat().st_size - 1)
    return target


def together(jobs: list[Callable[[], Any]], timeout: float = 30) -> list[Any]:
    """Run all at once, each in a thread; return what each returned or raised."""

    def guarded(job: Callable[[], Any]) -> Any:
        try:
            start.wait(timeout)
            return job()
        except Exception as error:
            return error

    start = threading.Barrier(len(jobs))
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [each.result(timeout) for each in [pool.submit(guarded, job) for job in jobs]]


def outcome(result: lily_py.Result) -> tuple[Any, ...]:
    return result.token_ids, result.text, result.finish_reason, result.logprobs, result.stop


def requests(count: int, seed: int) -> list[tuple[list[int], Keywords]]:
    """Requests of every kind: lengths, seeds, stop strings, penalties, log probabilities, processors."""
    rng = random.Random(seed)
    made: list[tuple[list[int], Keywords]] = []
    for i in range(count):
        keywords: Keywords = {
            "max_tokens": rng.randint(1, 24),
            "temperature": rng.choice([0, 0.7, 1.5]),
            "seed": rng.randrange(1 << 32),
        }
        if i % 3 == 0:
            keywords |= {"top_logprobs": 2}
        if i % 4 == 0:
            keywords |= {"stop": ["a", "e"]}
        if i % 5 == 0:
            keywords |= {"repetition_penalty": 1.3}
        if i % 7 == 0:
            keywords |= {"logits_processors": [lambda _, logits: logits * 0.5]}
        made.append((ids_of(rng.choice([1, 2, 7, 40, 130]), seed=rng.randrange(1000)), keywords))
    return made
