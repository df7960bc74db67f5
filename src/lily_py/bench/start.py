"""How long a fresh process takes to its first token, and the memory it then holds."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lily_py.bench import llama_cpp
from lily_py.bench.arms import Say
from lily_py.bench.process import run_process, run_worker
from lily_py.bench.workload import Spread
from lily_py.checkpoint import open_checkpoint


@dataclass
class StartResult:
    """Medians over fresh processes.

    Attributes:
        checkpoint: name of the model's folder.
        weight_bytes: of all its weights.
        prompt: tokens of the prompt.
        threads: compute threads.
        seconds: step -> seconds; ``first token`` is the sum of those before it, ``process`` the whole life.
        memory: kind -> resident bytes after the first token.
        peers: name -> seconds of a fresh process of a peer for the same.
        notes: what wasn't measured, and why.
    """

    checkpoint: str
    weight_bytes: int
    prompt: int
    threads: int
    seconds: dict[str, Spread] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    peers: dict[str, Spread] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"kind": "start", **asdict(self)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> StartResult:
        """Build from decoded JSON."""
        result = StartResult(**{key: value for key, value in values.items() if key != "kind"})
        result.seconds = {step: Spread(**spread) for step, spread in values["seconds"].items()}
        result.peers = {name: Spread(**spread) for name, spread in values["peers"].items()}
        return result


def measure_start(
    checkpoint_path: str,
    *,
    prompt: int = 16,
    threads: int = 0,
    rounds: int = 3,
    llama_settings: Sequence[llama_cpp.Setting] = (),
    priority: bool = False,
    say: Say = lambda line: None,
) -> StartResult:
    """Measure fresh processes; the files stay in the page cache from one to the next.

    Args:
        llama_settings: settings of llama.cpp to measure too: a process of `llama-bench` that runs the prompt
            without a warm-up.
    """
    checkpoint = open_checkpoint(checkpoint_path)
    result = StartResult(Path(checkpoint_path).name, checkpoint.nbytes, prompt, threads)
    steps: dict[str, list[float]] = {}
    peers: dict[str, list[float]] = {}
    if llama_settings and llama_cpp.find_program("llama-bench") is None:
        result.notes.append("llama.cpp: not measured: no llama-bench")
        say(result.notes[-1])
        llama_settings = ()
    for _ in range(rounds):
        request = {
            "checkpoint": checkpoint_path,
            "prompt": prompt,
            "threads": threads,
            "started": time.time(),
        }
        values, finished = run_worker("lily_py.bench.start_worker", request, priority=priority)
        for step, value in {**values["seconds"], "process": finished.seconds}.items():
            steps.setdefault(step, []).append(value)
        result.memory = values["memory"]
        for setting in llama_settings:
            command = llama_cpp.start_command(setting, checkpoint_path, prompt, threads)
            ended = run_process(command, priority=priority)
            json.loads(ended.output)
            peers.setdefault(f"llama.cpp {setting}", []).append(ended.seconds)
    result.seconds = {step: Spread.of(samples) for step, samples in steps.items()}
    result.peers = {name: Spread.of(samples) for name, samples in peers.items()}
    return result
