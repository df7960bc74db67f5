"""How well the model foresees a text: `prefill` and `decode_step` give the logits of every next token.

python examples/perplexity.py [MODEL]
"""

from __future__ import annotations

import sys

import numpy as np

import lily


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the softmax of logits [vocab], in float64."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


with lily.Engine.load(sys.argv[1] if len(sys.argv) > 1 else "demo") as engine:
    question = {"role": "user", "content": "Count from 3 to 9."}
    prompt = engine.apply_template([question], thinking=False)
    prefix = engine.tokenize(prompt, special_tokens=True)
    for answer in ("3, 4, 5, 6, 7, 8, 9.", "9, 8, 7, 6, 5, 4, 3."):
        tokens = engine.tokenize(answer)
        logits = engine.prefill(prefix)
        found = []
        for token in tokens:
            found.append(log_probabilities(logits)[token])
            logits = engine.decode_step(token)
        perplexity = np.exp(-np.mean(found))
        print(f"{answer}  perplexity {perplexity:.3f} over {len(tokens)} tokens")

    # The same numbers come with a generated answer.
    result = engine.generate("Count from 3 to 9.", temperature=0, thinking=False, top_logprobs=2)
    for entry in (result.logprobs or ())[:3]:
        others = ", ".join(f"{other.text!r} {other.logprob:.2f}" for other in entry.top)
        print(f"{entry.text!r:8} {entry.logprob:.4f}  best: {others}")
