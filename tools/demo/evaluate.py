"""Ask the demo model the questions of its suite, greedily, with mlx-lm computing in fp32.

python tools/demo/evaluate.py src/lily_py/demo tests/demo/questions.json      # needs mlx-lm
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo.judge import judge

MOST_TOKENS = 160


def answers(folder: Path, questions: list[dict[str, Any]]) -> list[str]:
    """Return what the model in `folder` says to each question, reasoning and calls included."""
    import mlx.core as mx
    from mlx_lm import generate, load

    mx.set_default_device(mx.cpu)
    model, tokenizer = load(str(folder))
    model.set_dtype(mx.float32)
    said = []
    for q in questions:
        prompt = tokenizer.apply_chat_template(
            q["messages"], tools=q["tools"], add_generation_prompt=True, enable_thinking=q["thinking"]
        )
        said.append(generate(model, tokenizer, prompt, max_tokens=MOST_TOKENS))
    return said


def main() -> None:
    """Print the pass rate of each kind and every wrong answer."""
    questions = json.loads(Path(sys.argv[2]).read_text())
    asked: Counter[str] = Counter()
    passed: Counter[str] = Counter()
    for q, text in zip(questions, answers(Path(sys.argv[1]), questions), strict=True):
        asked[q["kind"]] += 1
        if judge(q, text):
            passed[q["kind"]] += 1
        else:
            print(f"{q['id']}: {q['messages'][-1]['content']!r} wants {q['expect']}, got {text!r}")
    for kind, count in asked.items():
        print(f"{kind:12s} {passed[kind]:3d} / {count}")
    print(f"{'all':12s} {passed.total():3d} / {asked.total()}")


if __name__ == "__main__":
    main()
