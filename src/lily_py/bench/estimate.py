"""Tokens per second on a Mac, from counted work and published figures: for planning, not a measurement.

    token  = launches * launch + stages * stage
             + streamed bytes / (e_s * bandwidth) + kv bytes / (e_kv * bandwidth)
    chunk  = launches * (launch + stage) + streamed bytes / (e_s * bandwidth)
             + matrix operations / (e_m * matrix rate) + attention operations / (e_a * matrix rate)

The efficiencies e are those that explain the published speeds of the public Metal engine on one chip best;
lily is then estimated with the same ones, so that only what is counted differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import numpy.typing

from lily_py.bench.chips import CHIPS, Chip
from lily_py.bench.metal_work import LILY, LILY_TENSOR, PUBLIC, Engine, decode_work, prompt_work
from lily_py.bench.shapes import SHAPES, ModelShape
from lily_py.bench.tables import markdown_table

LAUNCH_SECONDS = 0.5e-6
"""An independent launch in a concurrent pass, as others measured it on M1 and later."""
STAGE_SECONDS = 1.5e-6
"""A barrier between dependent launches with the drain and ramp around it; 1 to 2 us were reported."""

PUBLISHED_CHIP = "m5-max"
PUBLISHED_SHAPE = "35b-a3b"
PUBLISHED: dict[int, tuple[float, float]] = {
    256: (2866.6, 194.7),
    512: (3859.9, 193.8),
    1024: (4734.6, 193.3),
    2048: (5274.3, 190.4),
    4096: (5724.4, 182.8),
    8192: (5457.6, 180.5),
    16384: (4968.5, 167.0),
    32768: (3927.5, 151.1),
    65536: (2752.5, 125.4),
    131072: (1792.7, 92.7),
}
"""Context -> (prefill, decode) in tok/s of the public engine, one request, 40-core M5 Max."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of a chip's published rates that kernels reach.

    Attributes:
        stream: of the bandwidth, for weights and state while decoding.
        kv_single, kv_packed: of the bandwidth, for keys and values read per query head, or once for several.
        chunk_stream: of the bandwidth, for weights in a chunk.
        matrix, attention: of the matrix rate.
    """

    stream: float
    kv_single: float
    kv_packed: float
    chunk_stream: float
    matrix: float
    attention: float


@dataclass(frozen=True)
class Estimate:
    """Tokens per second at one context."""

    context: int
    prefill: float
    decode: float


def calibrate() -> Efficiency:
    """Return the efficiencies that fit the published speeds with the least squared relative error."""
    chip, shape = CHIPS[PUBLISHED_CHIP], SHAPES[PUBLISHED_SHAPE]
    decode_rows, decode_times, prompt_rows, prompt_times = [], [], [], []
    for context, (prefill, decode) in PUBLISHED.items():
        token = decode_work(PUBLIC, shape, context)
        fixed = token.launches * LAUNCH_SECONDS + token.stages * STAGE_SECONDS
        decode_rows.append(
            [token.stream_bytes, token.kv_bytes * (not token.packed), token.kv_bytes * token.packed]
        )
        decode_times.append((1 / decode - fixed, 1 / decode))
        chunks = prompt_work(PUBLIC, shape, context)
        fixed = sum(chunk.launches for chunk in chunks) * (LAUNCH_SECONDS + STAGE_SECONDS)
        prompt_rows.append(
            [
                sum(chunk.stream_bytes for chunk in chunks),
                sum(chunk.matrix_operations for chunk in chunks),
                sum(chunk.attention_operations for chunk in chunks),
            ]
        )
        prompt_times.append((context / prefill - fixed, context / prefill))
    decoding = 1 / (_fit(decode_rows, decode_times) * chip.bandwidth)
    rates = [chip.bandwidth, chip.matrix_rate, chip.matrix_rate]
    prompts = 1 / (_fit(prompt_rows, prompt_times) * rates)
    return Efficiency(*map(float, (*decoding, *prompts)))


def _fit(rows: list[list[float]], times: list[tuple[float, float]]) -> numpy.typing.NDArray[numpy.float64]:
    """Return seconds per unit of each column; `times` has (seconds to explain, seconds they're a part of)."""
    weight = numpy.array([1 / whole for _, whole in times])
    target = numpy.array([part for part, _ in times]) * weight
    fitted: numpy.typing.NDArray[numpy.float64] = numpy.linalg.lstsq(
        numpy.array(rows) * weight[:, None], target, rcond=None
    )[0]
    return fitted


def estimate(
    engine: Engine, shape: ModelShape, chip: Chip, contexts: Sequence[int], efficiency: Efficiency
) -> list[Estimate]:
    """Return the speeds at each context: of the prompt up to it, and of the tokens after it."""
    return [
        Estimate(
            context,
            context / _prompt_seconds(engine, shape, chip, context, efficiency),
            1 / _token_seconds(engine, shape, chip, context, efficiency),
        )
        for context in contexts
    ]


def _token_seconds(
    engine: Engine, shape: ModelShape, chip: Chip, context: int, efficiency: Efficiency
) -> float:
    token = decode_work(engine, shape, context)
    kv = efficiency.kv_packed if token.packed else efficiency.kv_single
    return (
        token.launches * LAUNCH_SECONDS
        + token.stages * STAGE_SECONDS
        + token.stream_bytes / (efficiency.stream * chip.bandwidth)
        + token.kv_bytes / (kv * chip.bandwidth)
    )


def _prompt_seconds(
    engine: Engine, shape: ModelShape, chip: Chip, context: int, efficiency: Efficiency
) -> float:
    return sum(
        chunk.launches * (LAUNCH_SECONDS + STAGE_SECONDS)
        + chunk.stream_bytes / (efficiency.chunk_stream * chip.bandwidth)
        + chunk.matrix_operations / (efficiency.matrix * chip.matrix_rate)
        + chunk.attention_operations / (efficiency.attention * chip.matrix_rate)
        for chunk in prompt_work(engine, shape, context)
    )


def calibration_error(efficiency: Efficiency) -> dict[int, tuple[float, float]]:
    """Return context -> relative errors of (prefill, decode) on the published speeds; + is too fast."""
    chip, shape = CHIPS[PUBLISHED_CHIP], SHAPES[PUBLISHED_SHAPE]
    return {
        each.context: (
            each.prefill / PUBLISHED[each.context][0] - 1,
            each.decode / PUBLISHED[each.context][1] - 1,
        )
        for each in estimate(PUBLIC, shape, chip, tuple(PUBLISHED), efficiency)
    }


def estimate_report(shape: ModelShape, chip: Chip, contexts: Sequence[int]) -> str:
    """Return Markdown: lily's estimates, and how far the model is off where speeds were published."""
    rows = [
        [f"{each.context:,}", f"{each.prefill:,.0f}", f"{each.decode:,.1f}"]
        for each in lily_estimate(shape, chip, contexts)
    ]
    errors = calibration_error(calibrate())
    published = [
        [
            f"{context:,}",
            *(f"{speed:,.1f}" for speed in PUBLISHED[context]),
            *(f"{error:+.1%}" for error in errors[context]),
        ]
        for context in PUBLISHED
    ]
    lines = [
        f"estimated for {chip.name} ({chip.cores} GPU cores, {chip.bandwidth / 1e9:.0f} GB/s); "
        "nothing was measured on it",
        "",
        markdown_table(["context", "prefill tok/s", "decode tok/s"], rows),
        "",
        f"error of the same model on the published speeds of the {PUBLIC.name}, {CHIPS[PUBLISHED_CHIP].name}",
        "",
        markdown_table(
            ["context", "prefill tok/s", "decode tok/s", "prefill error", "decode error"], published
        ),
    ]
    if chip.name != CHIPS[PUBLISHED_CHIP].name:
        lines += ["", f"Efficiencies are those of the {CHIPS[PUBLISHED_CHIP].name}; other chips may differ."]
    return "\n".join(lines)


def lily_estimate(shape: ModelShape, chip: Chip, contexts: Sequence[int]) -> list[Estimate]:
    """Return lily's estimated speeds with the calibrated efficiencies."""
    return estimate(LILY_TENSOR if chip.tensor_units else LILY, shape, chip, contexts, calibrate())
