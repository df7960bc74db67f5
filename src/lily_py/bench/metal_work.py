"""What a decoded token and a prompt cost on a GPU: launches, dependent stages, bytes and operations.

For lily's kernels and for the public Metal engine whose published speeds calibrate the estimates. Counts
follow from the shape.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lily_py.bench.shapes import ModelShape

_CODE_BYTES = {4: 4 / 8 + 4 / 64, 8: 8 / 8 + 4 / 64}
"""Bytes of a weight, by bits: the code, and a bf16 scale and bias for 64 of them."""

_MATRIX_ROWS = 16
"""Rows of a tensor unit's operation."""


@dataclass(frozen=True)
class Engine:
    """How an engine cuts the model into launches.

    Attributes:
        gdn, attention, ends: (launches, stages) of a layer of either kind and of both ends, decoding.
        state_passes: times that the recurrent state crosses memory in a decoded token.
        packed_from: context from which query heads share the reads of keys and values.
        chunk: prompt tokens computed together.
        chunk_gdn, chunk_attention: launches of a layer in a whole chunk, at any context.
    """

    name: str
    gdn: tuple[int, int]
    attention: tuple[int, int]
    ends: tuple[int, int]
    state_passes: int
    packed_from: int
    chunk: int
    chunk_gdn: int
    chunk_attention: int


LILY = Engine(
    "lily", (6, 6), (8, 8), (3, 3), state_passes=2, packed_from=0, chunk=2048, chunk_gdn=14,
    chunk_attention=13,
)  # fmt: skip
LILY_TENSOR = replace(LILY, chunk=4096)
"""On GPUs with tensor units."""
PUBLIC = Engine(
    "public engine", (14, 10), (18, 12), (5, 5), state_passes=3, packed_from=8192, chunk=4096, chunk_gdn=45,
    chunk_attention=47,
)  # fmt: skip
"""The open release of the engine that published the speeds of `estimate.PUBLISHED` (pplx-garden, 2026-09)."""


@dataclass(frozen=True)
class DecodeWork:
    """One token: counts, and bytes of weights and state and of keys and values."""

    launches: int
    stages: int
    stream_bytes: float
    kv_bytes: float
    packed: bool


@dataclass(frozen=True)
class ChunkWork:
    """One chunk of a prompt: launches, bytes of the weights it touches, operations with rows padded."""

    launches: int
    stream_bytes: float
    matrix_operations: float
    attention_operations: float


def layers(shape: ModelShape) -> tuple[int, int]:
    """Return (gated delta net layers, attention layers)."""
    attention = sum(shape.is_attention(layer) for layer in range(shape.layers))
    return shape.layers - attention, attention


def decode_work(engine: Engine, shape: ModelShape, context: int) -> DecodeWork:
    """Count a token decoded after `context` tokens."""
    gdn, attention = layers(shape)
    kinds = ((gdn, engine.gdn), (attention, engine.attention), (1, engine.ends))
    per_token = shape.top_k / shape.experts if shape.experts else 0.0
    weights = _dense_bytes(shape) + per_token * _expert_bytes(shape) + _head(shape) * _CODE_BYTES[4]
    state = 4 * gdn * shape.value_heads * shape.gdn_dim**2
    return DecodeWork(
        launches=sum(count * kind[0] for count, kind in kinds),
        stages=sum(count * kind[1] for count, kind in kinds),
        stream_bytes=weights + engine.state_passes * state,
        kv_bytes=attention * 2 * 2 * shape.kv_heads * shape.head_dim * context,
        packed=context >= engine.packed_from,
    )


def prompt_work(engine: Engine, shape: ModelShape, tokens: int) -> list[ChunkWork]:
    """Count the chunks of a prompt."""
    return [
        _chunk_work(engine, shape, begin, min(engine.chunk, tokens - begin))
        for begin in range(0, tokens, engine.chunk)
    ]


def _chunk_work(engine: Engine, shape: ModelShape, begin: int, rows: int) -> ChunkWork:
    gdn, attention = layers(shape)
    operations: float = 2 * _padded(rows, _MATRIX_ROWS) * _dense_parameters(shape)
    stream = _dense_bytes(shape)
    if shape.experts:
        chosen = rows * shape.top_k
        idle = (1 - shape.top_k / shape.experts) ** rows
        # An expert's rows end in the middle of the rows that a matrix operation takes.
        padded = chosen + (1 - idle) * shape.experts * _MATRIX_ROWS / 2
        operations += 2 * padded * 3 * shape.hidden * shape.moe_width * shape.layers
        stream += (1 - idle) * _expert_bytes(shape)
    pairs = rows * begin + rows * (rows + 1) / 2
    return ChunkWork(
        launches=gdn * engine.chunk_gdn + attention * engine.chunk_attention,
        stream_bytes=stream,
        matrix_operations=operations,
        attention_operations=4 * shape.heads * shape.head_dim * attention * pairs,
    )


def _padded(rows: int, tile: int) -> int:
    return -(-rows // tile) * tile


def _projections(shape: ModelShape) -> int:
    """Parameters of the layers' projections."""
    gdn, attention = layers(shape)
    values = shape.value_heads * shape.gdn_dim
    queries = shape.heads * shape.head_dim
    of_gdn = shape.hidden * (shape.conv_channels + 2 * values + 2 * shape.value_heads)
    of_attention = shape.hidden * (3 * queries + 2 * shape.kv_heads * shape.head_dim)
    return gdn * of_gdn + attention * of_attention


def _dense_parameters(shape: ModelShape) -> int:
    """Parameters that every row of a chunk meets, without routers."""
    width = shape.shared_width if shape.experts else shape.dense_width
    return _projections(shape) + shape.layers * 3 * shape.hidden * width


def _dense_bytes(shape: ModelShape) -> float:
    routers = shape.layers * shape.hidden * (shape.experts + 1) if shape.experts else 0
    return _dense_parameters(shape) * _CODE_BYTES[4] + routers * _CODE_BYTES[8]


def _expert_bytes(shape: ModelShape) -> float:
    """Bytes of all experts."""
    return shape.layers * shape.experts * 3 * shape.hidden * shape.moe_width * _CODE_BYTES[4]


def _head(shape: ModelShape) -> int:
    return shape.vocab * shape.hidden
