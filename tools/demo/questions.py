"""Write the question suite tests/demo/questions.json, once, before the final training.

    python tools/demo/questions.py tests/demo/questions.json

Each question is {id, kind, messages, tools, thinking, expect, held_out}: `expect` is {"contains": text that
the answer must hold} or {"tool_calls": [{name, arguments}]}, and `held_out` lists what the training data
must never contain.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo.data import SUITE_KINDS, Sampler

SEED = 20260501
PER_KIND = 12


def build() -> list[dict[str, object]]:
    """Return the questions, twelve of each kind, thinking on in every second one."""
    sampler = Sampler(SEED, unseen_only=True)
    questions: list[dict[str, object]] = []
    for kind in SUITE_KINDS:
        for number in range(PER_KIND):
            q = sampler.question(kind, number)
            questions.append(
                {
                    "id": f"{kind}-{number + 1:02d}",
                    "kind": kind,
                    "messages": q.messages,
                    "tools": q.tools,
                    "thinking": q.thinking,
                    "expect": q.expect,
                    "held_out": sorted(q.keys),
                }
            )
    return questions


def held_out(path: Path) -> frozenset[str]:
    """Return every key that the suite at `path` keeps out of the training data."""
    return frozenset(key for question in json.loads(path.read_text()) for key in question["held_out"])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(build(), indent=1, ensure_ascii=False) + "\n")
