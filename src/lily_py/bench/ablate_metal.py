"""What each optimisation of the Metal backend does to a token: launches, stages, barriers, bytes, time.

The counts are of the command stream: bytes are the launches' own estimates, which leave out what caches
serve. They are the same on every machine; tokens per second are this machine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lily_py import _core
from lily_py.bench.workload import prompt_ids
from lily_py.checkpoint import Checkpoint, open_checkpoint
from lily_py.errors import InvalidArgumentError
from lily_py.loader import load_model
from lily_py.sampling import SamplingOptions

METAL_ABLATIONS = {
    "row_parallel_products": "several outputs per simdgroup, masked codes (without: one, shifted codes)",
    "fused_norms": "norms in the products that read them (without: a launch before them)",
    "fused_adds": "products added to the residual stream in place (without: a launch after them)",
    "fused_gate_up": "gate, up and SwiGLU in one launch (without: one each, and one that chooses experts)",
    "fused_down": "down, routing weights, shared expert and residual in one launch (without: one each)",
    "fused_rotary": "norms and rotation of queries and keys, and append in one launch (without: one each)",
    "fused_delta_norm": "the recurrence's gated norm in it and in the next product (without: a launch)",
    "concurrent_pass": "launches overlap, barriers only where one needs another (without: in order)",
    "token_handoff": "the GPU picks the token and goes on (without: the host draws and feeds each)",
    "coalesced_cache_reads": "neighbouring lanes read neighbouring bytes of the cache (without: any)",
    "gqa_packing": "query heads share reads of the cache (without: each reads by itself)",
    "long_context_blocks": "attention's splits grow with the context (without: a page each)",
    "bf16_activations": "bf16 between operations (without: fp32)",
    "matrix_prefill": "kernels of many rows for prompts (without: eight rows at a time)",
}
"""What is switched off, one at a time."""

COUNTS = ("launches", "stages", "barriers", "command buffers", "bytes")


@dataclass(frozen=True)
class TokenCost:
    """What one generated token takes, on average over some.

    Attributes:
        switched_off: the ablation; empty for none.
        counts: by the names in `COUNTS`.
        tokens_per_second: on this machine.
    """

    switched_off: str
    counts: dict[str, float]
    tokens_per_second: float


def count_ablations(
    path: str,
    *,
    names: Sequence[str] = tuple(METAL_ABLATIONS),
    context: int = 128,
    decode: int = 16,
    say: Callable[[str], object] = lambda line: None,
) -> list[TokenCost]:
    """Return the cost of a token with everything on, and with each of `names` off.

    Args:
        path: folder of a checkpoint, or ``"demo"``.
        context: tokens before those that are measured.
        decode: tokens to measure.

    Raises:
        InvalidArgumentError: an ablation that isn't known.
        BackendError: no Metal backend here.
    """
    if unknown := [name for name in names if name not in METAL_ABLATIONS]:
        raise InvalidArgumentError(
            f"optimisation {unknown[0]!r} isn't known; choose from {', '.join(METAL_ABLATIONS)}"
        )
    checkpoint = open_checkpoint(path)
    costs = []
    for name in ("", *names):
        say(f"without {name}" if name else "everything on")
        model = load_model(checkpoint, backend="metal", ablate=(name,) if name else ())
        costs.append(_token_cost(model, checkpoint, name, context, decode))
    return costs


def _token_cost(
    model: _core.Model, checkpoint: Checkpoint, name: str, context: int, decode: int
) -> TokenCost:
    vocabulary = checkpoint.config.vocab_size
    sequence, sampler = model.new_sequence(), SamplingOptions(temperature=0.0).make_sampler(0, vocabulary)
    logits = model.forward(sequence, prompt_ids(context, vocabulary))
    assert logits is not None
    token = int(logits.argmax())
    for _ in range(2):  # until a step is ahead of its reader
        token = model.step(sequence, token, sampler)
    before, begun = model.counts, time.perf_counter()
    for _ in range(decode):
        token = model.step(sequence, token, sampler)
    seconds, after = time.perf_counter() - begun, model.counts
    counts = {count: (after[count] - before[count]) / decode for count in COUNTS}
    return TokenCost(name, counts, decode / seconds)


def cost_table(costs: Sequence[TokenCost]) -> str:
    """Return a Markdown table, a line for each ablation."""
    lines = [
        "| switched off | launches | stages | barriers | command buffers | MB | tok/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cost in costs:
        c = cost.counts
        numbers = [f"{c[name]:.0f}" for name in COUNTS[:-1]]
        numbers += [f"{c['bytes'] / 1e6:,.3f}", f"{cost.tokens_per_second:,.1f}"]
        label = f"`{cost.switched_off}`" if cost.switched_off else "nothing"
        lines.append(f"| {label} | {' | '.join(numbers)} |")
    return "\n".join(lines)
