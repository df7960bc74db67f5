"""What each optimisation of the Metal backend does to a prompt and to a token: launches, bytes, time.

The counts are of the command stream: bytes, and a prompt's multiply-adds of matrices, are the launches' own
estimates, which leave out what caches serve. They are the same on every machine; tokens per second are this
machine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lily_py import _core
from lily_py.bench.tables import markdown_table
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
    "compressed_weights": "weights expanded tile by tile as they are multiplied (without: whole, before)",
    "gpu_routing": "the GPU lists rows by expert (without: the host waits and lists them in every layer)",
    "fitted_tiles": "tiles fit the rows of an expert (without: 64 rows each)",
    "register_scan": "a prompt's recurrence row by row in registers (without: by blocks of 16 rows)",
    "chunked_prefill": "prompts in blocks of 2,048 or 4,096 rows (without: as many as are given at once)",
}
"""What is switched off, one at a time."""

_EVENTS = ("launches", "stages", "barriers", "command buffers")
_MILLIONS = {"bytes read": "MB read", "bytes written": "MB written", "multiply-adds": "M multiply-adds"}
COUNTS = (*_EVENTS, *_MILLIONS)


@dataclass(frozen=True)
class Cost:
    """What a phase takes: a whole prompt, or one generated token on average over some.

    Attributes:
        counts: by the names in `COUNTS`.
        tokens_per_second: on this machine.
    """

    counts: dict[str, float]
    tokens_per_second: float


@dataclass(frozen=True)
class AblationCost:
    """Both phases with one ablation.

    Attributes:
        switched_off: its name; empty for none.
        prompt: the tokens before those that are generated.
        token: one of those.
    """

    switched_off: str
    prompt: Cost
    token: Cost


def count_ablations(
    path: str,
    *,
    names: Sequence[str] = tuple(METAL_ABLATIONS),
    context: int = 128,
    decode: int = 16,
    say: Callable[[str], object] = lambda line: None,
) -> list[AblationCost]:
    """Return the cost of a prompt and of a token with everything on, and with each of `names` off.

    Args:
        path: folder of a checkpoint, or ``"demo"``.
        context: tokens of the prompt.
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
        costs.append(_cost(model, checkpoint, name, context, decode))
    return costs


def _cost(model: _core.Model, checkpoint: Checkpoint, name: str, context: int, decode: int) -> AblationCost:
    vocabulary = checkpoint.config.vocab_size
    sequence, sampler = model.new_sequence(), SamplingOptions(temperature=0.0).make_sampler(0, vocabulary)
    tokens: list[int] = []

    def feed() -> None:
        logits = model.forward(sequence, prompt_ids(context, vocabulary))
        assert logits is not None
        tokens.append(int(logits.argmax()))

    def step() -> None:
        tokens.append(model.step(sequence, tokens[-1], sampler))

    prompt, seconds = _counted(model, feed, 1)
    _counted(model, step, 2)  # until a step is ahead of its reader
    token, step_seconds = _counted(model, step, decode)
    return AblationCost(name, Cost(prompt, context / seconds), Cost(token, 1 / step_seconds))


def _counted(model: _core.Model, work: Callable[[], None], times: int) -> tuple[dict[str, float], float]:
    """Return counts and seconds of one of several times."""
    before, begun = model.counts, time.perf_counter()
    for _ in range(times):
        work()
    seconds, after = time.perf_counter() - begun, model.counts
    return {count: (after[count] - before[count]) / times for count in COUNTS}, seconds / times


def cost_table(costs: Sequence[AblationCost], phase: Literal["prompt", "token"]) -> str:
    """Return a Markdown table of one phase, a line for each ablation; multiply-adds are of prompts only."""
    millions = {n: title for n, title in _MILLIONS.items() if phase == "prompt" or n != "multiply-adds"}
    rows = []
    for cost in costs:
        of_phase = cost.prompt if phase == "prompt" else cost.token
        numbers = [f"{of_phase.counts[name]:.0f}" for name in _EVENTS]
        numbers += [f"{of_phase.counts[name] / 1e6:,.3f}" for name in millions]
        label = f"`{cost.switched_off}`" if cost.switched_off else "nothing"
        rows.append([label, *numbers, f"{of_phase.tokens_per_second:,.1f}"])
    return markdown_table(["switched off", *_EVENTS, *millions.values(), "tok/s"], rows)
