"""One answer, and what comes with it: text, thought, tokens, speed.

python examples/generate.py [MODEL]
"""

from __future__ import annotations

import sys

import lily

with lily.Engine.load(sys.argv[1] if len(sys.argv) > 1 else "demo") as engine:
    result = engine.generate("What is 27 + 48?", temperature=0, thinking=True)
    print("answer: ", result.text)
    print("thought:", result.reasoning)
    print("tokens: ", result.usage.prompt_tokens, "read,", result.usage.completion_tokens, "written")
    print(f"speed:   {result.timings.decode_tokens_per_second:.0f} tokens/s")

    # A seed makes sampling repeatable; n gives several answers, those of seed, seed + 1, ...
    several = engine.generate("Count from 3 to 9.", temperature=0.8, seed=1, n=3, thinking=False)
    for answer in several.choices:
        print("sampled:", answer.text)
