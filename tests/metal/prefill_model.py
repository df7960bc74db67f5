"""A prefill chunk of a tiny checkpoint as a list of launches, as a backend would encode it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from metal_model import PAGES, MetalModel, Packed, Step
from metal_reference import EPS, Array, Buffer, structure
from prefill_reference import SIMDGROUP
from test_metal_attention import PAGE


def dense_tile(tiles: tuple[int, ...], rows: int) -> int:
    """Rows of a tile of a dense product."""
    return next((tile for tile in tiles if tile >= rows), 64)


def expert_tile(tiles: tuple[int, ...], rows: int, experts: int, top_k: int) -> int:
    """Rows of a block, from the mean rows of an expert."""
    mean = rows * top_k / min(experts, rows * top_k)
    return max(tiles[0], 8 if mean < 4 else 16 if mean < 16 else 32 if mean < 64 else 64)


@dataclass
class Chunk:
    """Buffers of one chunk; residual, out and projected are as wide as their widest use."""

    tokens: Buffer
    positions: Buffer
    sequences: Buffer
    residual: Buffer
    normed: Buffer
    inverses: Buffer
    projected: Buffer
    mixed: Buffer
    gates: Buffer
    out: Buffer
    logits: Buffer
    routing: Buffer
    picks: Buffer
    counts: Buffer
    entries: Buffer
    blocks: Buffer
    acts: Buffer
    down: Buffer


class PrefillModel(MetalModel):
    """A checkpoint that takes prompts in chunks through the kernels of many rows."""

    path = SIMDGROUP
    """How matrices are multiplied; its library is "matrix"."""
    form = "scan"
    """Evaluation of the recurrence: scan or blocks."""

    def chunk(self, tokens: Array, sources: list[int]) -> Array:
        """Logits [sources, vocab] of these rows of the next tokens."""
        m, rows = self.model, len(tokens)
        tile = expert_tile(self.path.tiles, rows, self.experts, m.top_k)
        c = self._buffers(tokens, tile)
        with self.sim.encoder(concurrent=True) as encoder:
            launch = Step(encoder, self.libraries)
            shape = structure(rows, m.hidden, self.table.group_shift)
            arguments = self.table.arguments() | {3: c.tokens, 4: c.residual, 5: shape}
            launch("head", f"embed_b{self.table.bits}", arguments, (-(-m.hidden // 1024), rows), 32)
            for i, layer in enumerate(self.layers):
                (self._attention_rows if m.is_attention(i) else self._delta_rows)(launch, layer, c, rows)
                self._expert_rows(launch, layer, c, rows, tile)
            few_rows = self.residual, self.hidden
            self.residual, self.hidden = c.residual, c.down
            if sources:
                self.sources.array(np.uint32)[: len(sources)] = sources
                self._head(launch, len(sources))
            self.residual, self.hidden = few_rows
        assert self.sim.diagnostics() == []
        self.sources.array(np.uint32)[:] = np.arange(8)
        self.position += rows
        return self.logits.array(np.float32)[: len(sources) * m.vocab].reshape(-1, m.vocab).copy()

    def _buffers(self, tokens: Array, tile: int) -> Chunk:
        m, rows, slots = self.model, len(tokens), self.model.top_k + 1
        pairs = rows * m.top_k
        capacity = -(-pairs // tile) + min(self.experts, pairs) + -(-rows // tile)
        positions = (self.position + np.arange(rows)).astype(np.uint32)
        values = max(m.heads * m.head_dim, m.value_heads * m.value_dim)
        return Chunk(
            self.sim.buffer(tokens.astype(np.uint32), "tokens"),
            self.sim.buffer(positions, "positions"),
            self.sim.buffer(np.zeros(rows, np.uint32), "sequences"),
            *(
                self._floats(rows, width)
                for width in (
                    m.hidden, m.hidden, 1, max(self.delta_stride, self.attention_stride), self.channels,
                    2 * m.value_heads + m.key_heads, values, self.experts + 1, 2 * m.top_k + 1, m.top_k,
                )
            ),
            self._floats(-(-rows // 32), self.experts),
            self._floats(rows, slots),
            self._floats(capacity, 4),
            self._floats(rows * slots, max(self.width, self.shared)),
            self._floats(rows * slots, m.hidden),
        )  # fmt: skip

    def _norm_rows(self, launch: Step, gain: Buffer, c: Chunk, rows: int) -> None:
        shape = structure(rows, self.model.hidden, 0, 0, 0, EPS)
        arguments = {0: c.residual, 1: gain, 2: c.normed, 3: c.inverses, 4: shape}
        launch("matrix_simdgroup", "norm_rows", arguments, rows, 256)

    def _product(
        self, launch: Step, kernel: str, w: Packed, x: Buffer, out: Buffer, rows: int, stride: int
    ) -> None:
        tile = dense_tile(self.path.tiles, rows)
        shape = structure(rows, w.cols, w.rows, stride, w.group_shift, EPS)
        groups = (-(-w.rows // self.path.columns(kernel, tile)), -(-rows // tile))
        arguments = w.arguments() | {3: x, 4: out, 5: shape}
        launch("matrix", f"{kernel}_b{w.bits}_t{tile}", arguments, groups, self.path.threads(tile))

    def _delta_rows(self, launch: Step, layer: dict[str, Any], c: Chunk, rows: int) -> None:
        m, stride = self.model, self.delta_stride
        self._norm_rows(launch, layer["input_norm"], c, rows)
        self._product(launch, "project_rows", layer["project"], c.normed, c.projected, rows, stride)
        values = m.value_heads * m.value_dim
        sizes = (rows, m.key_heads, m.value_heads, m.value_dim, self.channels, stride)
        arguments = {0: c.projected, 1: layer["conv"], 2: layer["a_log"], 3: layer["dt_bias"]}
        arguments |= {4: layer["history"], 5: c.mixed, 6: c.gates, 7: c.positions, 8: structure(*sizes, 1e-6)}
        units = m.key_heads + -(-values // m.key_dim) + 1
        kernel = f"delta_prepare_k{m.key_dim // 32}_c{m.kernel}"
        launch("delta_rule_scan", kernel, arguments, (-(-units // 4), -(-rows // 32)), 128)
        columns = 16 if self.form == "scan" else 32
        arguments = {0: c.mixed, 1: c.gates, 2: layer["state"], 3: c.out, 4: structure(*sizes, 1e-6)}
        groups = (-(-m.value_dim // columns), m.value_heads)
        launch("delta_rule_scan", f"delta_{self.form}_k{m.key_dim // 32}", arguments, groups, 128)
        arguments = {0: c.out, 1: c.projected, 2: layer["norm"], 3: structure(*sizes, EPS)}
        launch("delta_rule_scan", "gated_norm_rows", arguments, (-(-m.value_heads // 4), rows), 128)
        self._product(launch, "project_add_rows", layer["out"], c.out, c.residual, rows, m.hidden)

    def _attention_rows(self, launch: Step, layer: dict[str, Any], c: Chunk, rows: int) -> None:
        m, stride = self.model, self.attention_stride
        self._norm_rows(launch, layer["input_norm"], c, rows)
        self._product(launch, "project_rows", layer["project"], c.normed, c.projected, rows, stride)
        page = self.attention_layers * m.kv_heads * 2 * PAGE * m.head_dim
        offset = layer["cache"] * m.kv_heads * 2 * PAGE * m.head_dim
        sizes = (m.heads, m.kv_heads, m.rotary_dims // 2, stride, PAGES, page, offset, PAGES, 4096, 32768)
        arguments = {0: c.projected, 1: layer["q_norm"], 2: layer["k_norm"], 3: self.coarse, 4: self.fine}
        arguments |= {5: c.positions, 6: c.sequences, 7: self.pages, 8: self.cache, 9: structure(*sizes, EPS)}
        heads = (-(-(m.heads + m.kv_heads) // 4), rows)
        launch("attention", f"rotary_append_float_d{m.head_dim}", arguments, heads, 128)
        tile = 16 if m.head_dim == 256 else 32
        pack = min(m.heads // m.kv_heads, tile)
        shape = structure(rows, m.heads, m.kv_heads, pack, stride, page, offset, PAGES, 1)
        arguments = {
            0: c.projected,
            1: c.positions,
            2: self.pages,
            3: self.cache,
            4: c.out,
            5: c.out,
            6: c.out,
        }
        groups = (m.kv_heads * -(-(m.heads // m.kv_heads) // pack), -(-rows // (tile // pack)), 1)
        launch("attention_prefill", f"attend_rows_float_d{m.head_dim}", arguments | {7: shape}, groups, 128)
        self._product(launch, "project_add_rows", layer["out"], c.out, c.residual, rows, m.hidden)

    def _expert_rows(self, launch: Step, layer: dict[str, Any], c: Chunk, rows: int, tile: int) -> None:
        m, w, up, down = self.model, layer["router"], layer["up"], layer["down"]
        slots, stride = m.top_k + 1, max(self.width, self.shared)
        pairs = rows * m.top_k
        capacity = -(-pairs // tile) + min(self.experts, pairs) + -(-rows // tile)
        self._norm_rows(launch, layer["mlp_norm"], c, rows)
        shape = structure(rows, w.cols, w.rows, w.rows, w.group_shift, EPS)
        arguments = w.arguments() | {
            3: c.residual,
            4: layer["mlp_norm"],
            5: c.inverses,
            6: c.logits,
            7: shape,
        }
        groups = (-(-w.rows // 64), -(-rows // 16))
        launch("matrix_simdgroup", f"route_rows_b{w.bits}", arguments, groups, 128)
        shape = structure(rows, self.experts, m.top_k, 1, 1, tile, capacity)
        arguments = {0: c.logits, 1: c.routing, 2: c.picks, 3: c.counts, 4: shape}
        launch("routing", "choose_rows", arguments, -(-rows // 32), 256)
        launch("routing", "lay_out", {0: c.counts, 1: c.blocks, 2: shape}, 1, 512)
        arguments = {0: c.picks, 1: c.counts, 2: c.entries, 3: shape}
        launch("routing", "scatter_rows", arguments, -(-rows * slots // 256), 256)
        shifts = (up.group_shift, layer["shared_up"].group_shift)
        sizes = (self.experts, m.top_k, slots, self.width, self.shared, stride, m.hidden, *shifts, 0)
        shape = structure(*sizes)
        for kernel, w, shared, x, out, width in (
            ("experts_up_rows", up, layer["shared_up"], c.normed, c.acts, stride),
            ("experts_down_rows", down, layer["shared_down"], c.acts, c.down, m.hidden),
        ):
            arguments = w.arguments() | shared.arguments(3)
            arguments |= {6: x, 7: c.entries, 8: c.blocks, 9: out, 10: shape}
            groups = (-(-width // self.path.columns(kernel, tile)), capacity)
            threads = self.path.threads(tile)
            launch("matrix", f"{kernel}_b{w.bits}_t{tile}", arguments, groups, threads)
        arguments = {0: c.down, 1: c.routing, 2: c.residual, 3: shape}
        launch("matrix_simdgroup", "combine_rows", arguments, (-(-m.hidden // 1024), rows), 256)
