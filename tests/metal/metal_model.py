"""A whole decode step of a tiny checkpoint as a list of launches, as a backend would encode it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from metal_reference import EPS, Array, Buffer, Encoder, Library, Simulator, launched, structure
from oracles.reference import Reference
from test_metal_attention import PAGE, tables

HISTORY = 16
CAPACITY = 8  # rows
PAGES = 4


@dataclass(frozen=True)
class Packed:
    """A quantised matrix in three buffers; `rows` and `cols` of one matrix of the stack."""

    buffers: tuple[Buffer, Buffer, Buffer]
    bits: int
    group: int
    rows: int
    cols: int
    nbytes: int

    @property
    def group_shift(self) -> int:
        return self.group.bit_length() - 1

    def arguments(self, first: int = 0) -> dict[int, Buffer]:
        return {first + i: buffer for i, buffer in enumerate(self.buffers)}


@dataclass
class Step:
    """One pass: launches go to the encoder, a barrier before each that depends on an earlier one."""

    encoder: Encoder
    libraries: dict[str, Library]
    started: bool = field(default=False)

    def __call__(self, file: str, kernel: str, arguments: dict[int, Any], groups: Any, group: int) -> None:
        if self.started:
            self.encoder.barrier()
        self.started = True
        launched(
            self.encoder,
            library=self.libraries[file],
            kernel=kernel,
            arguments=arguments,
            groups=groups,
            group=group,
        )


class MetalModel:
    """A checkpoint whose matrices are all quantised, with one sequence; activations and cache are fp32."""

    def __init__(self, sim: Simulator, libraries: dict[str, Library], folder: Path) -> None:
        self.sim, self.libraries = sim, libraries
        self.model = m = Reference(folder)
        self.tensors: dict[str, Array] = m._tensors
        self.position = 0
        h = m.hidden
        self.channels = 2 * m.key_heads * m.key_dim + m.value_heads * m.value_dim
        self.delta_stride = self.channels + m.value_heads * (m.value_dim + 2)
        self.attention_stride = 2 * m.head_dim * (m.heads + m.kv_heads)
        self.experts = int(m.config["num_experts"])
        self.width = int(m.config["moe_intermediate_size"])
        self.shared = int(m.config["shared_expert_intermediate_size"])
        self.table = self._packed(["embed_tokens"])
        self.head = self._packed(["lm_head"])
        self.layers = [self._layer(f"layers.{i}.", m.is_attention(i)) for i in range(m.layers)]
        for i, layer in enumerate(self.layers):
            layer["cache"] = sum(m.is_attention(j) for j in range(i))
        self.final_norm = self._norm("norm")
        rows = CAPACITY
        self.residual = self._floats(rows, h)
        self.projected = self._floats(rows, max(self.delta_stride, self.attention_stride))
        self.mixed = self._floats(rows, max(m.heads * m.head_dim, m.value_heads * m.value_dim))
        self.squares = self._floats(rows, m.value_heads * (m.value_dim // 16))
        self.normed, self.hidden = self._floats(rows, h), self._floats(rows, h)
        self.router_logits = self._floats(rows, self.experts + 1)
        self.routing = self._floats(rows, 2 * m.top_k + 1)
        self.acts = self._floats(rows, (m.top_k + 1) * max(self.width, self.shared))
        self.logits = self._floats(rows, m.vocab)
        self.partial = self._floats(rows, m.heads * PAGES * m.head_dim)
        self.statistics = self._floats(rows, m.heads * PAGES * 2)
        self.tokens, self.positions = sim.buffer(4 * rows, "tokens"), sim.buffer(4 * rows, "positions")
        self.keys, self.best = sim.buffer(4 * rows, "keys"), sim.buffer(8 * rows * m.vocab, "best")
        self.sources = sim.buffer(np.arange(rows, dtype=np.uint32), "sources")
        self.sequences = sim.buffer(np.zeros(rows, np.uint32), "sequences")
        self.pages = sim.buffer(np.array([2, 0, 3, 1], np.uint32), "pages")
        self.attention_layers = sum(m.is_attention(i) for i in range(m.layers))
        page = self.attention_layers * m.kv_heads * 2 * PAGE * m.head_dim
        self.cache = self._floats(PAGES, page)
        self.coarse, self.fine = (sim.buffer(t) for t in tables(m.rotary_dims, PAGES * PAGE))

    def _floats(self, rows: int, width: int) -> Buffer:
        return self.sim.buffer(4 * rows * width, "activation")

    def _floats_of(self, array: Array) -> Buffer:
        return self.sim.buffer(array.astype(np.float32))

    def _norm(self, name: str) -> Buffer:
        return self._floats_of(self.tensors[f"{name}.weight"])

    def _packed(self, names: list[str]) -> Packed:
        """Matrices of one format in groups of 64, above each other; those of stacks [E, N, K] per expert."""
        parts = [
            np.concatenate([self.tensors[f"{name}.{part}"] for name in names], axis=-2)
            for part in ("weight", "scales", "biases")
        ]
        group = 64
        cols = parts[1].shape[-1] * group
        bits = parts[0].shape[-1] * 32 // cols
        buffers = tuple(self.sim.buffer(part, names[0]) for part in parts)
        return Packed(
            buffers,  # type: ignore[arg-type]
            bits,
            group,
            parts[0].shape[-2],
            cols,
            sum(part.nbytes for part in parts),
        )

    def _layer(self, p: str, attention: bool) -> dict[str, Any]:
        """Parameters of the layer whose tensors' names begin with `p`."""
        m = self.model
        layer: dict[str, Any] = {
            "input_norm": self._norm(p + "input_layernorm"),
            "mlp_norm": self._norm(p + "post_attention_layernorm"),
            "router": self._packed([p + "mlp.gate", p + "mlp.shared_expert_gate"]),
            "up": self._packed([p + "mlp.switch_mlp.gate_proj", p + "mlp.switch_mlp.up_proj"]),
            "down": self._packed([p + "mlp.switch_mlp.down_proj"]),
            "shared_up": self._packed([p + "mlp.shared_expert.gate_proj", p + "mlp.shared_expert.up_proj"]),
            "shared_down": self._packed([p + "mlp.shared_expert.down_proj"]),
        }
        if attention:
            a = p + "self_attn."
            layer["project"] = self._packed([a + "q_proj", a + "k_proj", a + "v_proj"])
            layer["out"] = self._packed([a + "o_proj"])
            layer["q_norm"], layer["k_norm"] = self._norm(a + "q_norm"), self._norm(a + "k_norm")
            return layer
        a = p + "linear_attn."
        layer["project"] = self._packed([f"{a}in_proj_{part}" for part in ("qkv", "z", "b", "a")])
        layer["out"] = self._packed([a + "out_proj"])
        layer["conv"] = self._floats_of(self.tensors[a + "conv1d.weight"].reshape(-1, m.kernel).T)
        layer["a_log"] = self._floats_of(self.tensors[a + "A_log"])
        layer["dt_bias"] = self._floats_of(self.tensors[a + "dt_bias"])
        layer["norm"] = self._norm(a + "norm")
        layer["history"] = self._floats(HISTORY, self.channels)
        layer["state"] = self.sim.buffer(
            np.zeros((m.value_heads, m.value_dim, m.key_dim), np.float32), "state"
        )
        return layer

    def step(self, tokens: Array | None, rows: int) -> Array:
        """Logits [rows, vocab] of the next `rows` tokens; None takes what the device chose for row 0."""
        m = self.model
        if tokens is not None:
            self.tokens.array(np.uint32)[:rows] = tokens
        self.positions.array(np.uint32)[:rows] = self.position + np.arange(rows)
        with self.sim.encoder(concurrent=True) as encoder:
            launch = Step(encoder, self.libraries)
            launch(
                "head",
                f"embed_b{self.table.bits}",
                self.table.arguments()
                | {3: self.tokens, 4: self.residual}
                | {5: structure(rows, m.hidden, self.table.group_shift)},
                (-(-m.hidden // 1024), rows),
                32,
            )
            for i, layer in enumerate(self.layers):
                if m.is_attention(i):
                    self._attention(launch, layer, rows)
                else:
                    self._delta(launch, layer, rows)
                self._experts(launch, layer, rows)
            self._head(launch, rows)
        assert self.sim.diagnostics() == []
        self.position += rows
        return self.logits.array(np.float32)[: rows * m.vocab].reshape(rows, m.vocab).copy()

    @staticmethod
    def _room(rows: int) -> int:
        return next(room for room in (1, 2, 4, 8) if room >= rows)

    def _project(self, launch: Step, layer: dict[str, Any], rows: int, stride: int) -> None:
        w, room = layer["project"], self._room(rows)
        arguments = w.arguments() | {3: self.residual, 4: layer["input_norm"], 5: self.projected}
        arguments[6] = structure(rows, w.cols, w.rows, stride, w.group_shift, EPS)
        groups = -(-w.rows // (16 * min(4, 16 // room)))
        launch("project", f"norm_project_b{w.bits}_m{room}", arguments, groups, 256)

    def _add(self, launch: Step, w: Packed, rows: int, kind: str, more: dict[int, Any]) -> None:
        room = self._room(rows)
        arguments = w.arguments() | {3: self.mixed, 4: self.residual} | more
        arguments[5] = structure(rows, w.cols, w.rows, w.rows, w.group_shift, EPS)
        launch("project", f"{kind}_b{w.bits}_m{room}", arguments, -(-w.rows // 16), 128)

    def _delta(self, launch: Step, layer: dict[str, Any], rows: int) -> None:
        m = self.model
        self._project(launch, layer, rows, self.delta_stride)
        arguments = {0: self.projected, 1: layer["conv"], 2: layer["a_log"], 3: layer["dt_bias"]}
        arguments |= {4: layer["norm"], 5: layer["history"], 6: layer["state"], 7: self.mixed}
        arguments |= {8: self.squares, 9: self.positions, 11: layer["state"]}
        sizes = (rows, m.key_heads, m.value_heads, m.value_dim, m.kernel, self.delta_stride, 1e-6)
        slices = m.value_dim // 16
        launch(
            "delta_rule",
            f"delta_rule_k{m.key_dim // 32}_m{1 if rows == 1 else 8}",
            arguments | {10: structure(*sizes)},
            (slices, m.value_heads),
            128,
        )
        norm = structure(m.value_heads, m.value_dim.bit_length() - 1, slices, EPS)
        self._add(launch, layer["out"], rows, "project_add_heads", {6: self.squares, 7: norm})

    def _attention(self, launch: Step, layer: dict[str, Any], rows: int) -> None:
        m = self.model
        self._project(launch, layer, rows, self.attention_stride)
        page = self.attention_layers * m.kv_heads * 2 * PAGE * m.head_dim
        offset = layer["cache"] * m.kv_heads * 2 * PAGE * m.head_dim
        shape = structure(
            m.heads, m.kv_heads, m.rotary_dims // 2, self.attention_stride, PAGES, page, offset, PAGES,
            4096, 32768, EPS,
        )  # fmt: skip
        arguments = {0: self.projected, 1: layer["q_norm"], 2: layer["k_norm"], 3: self.coarse, 4: self.fine}
        arguments |= {5: self.positions, 6: self.sequences, 7: self.pages, 8: self.cache}
        heads = (-(-(m.heads + m.kv_heads) // 4), rows)
        launch("attention", f"rotary_append_float_d{m.head_dim}", arguments | {9: shape}, heads, 128)
        splits = -(-(self.position + rows) // PAGE)
        arguments = {0: self.projected, 1: self.positions, 2: self.sequences, 3: self.pages, 4: self.cache}
        arguments |= {5: self.partial, 6: self.statistics, 7: shape}
        packs = -(-(m.heads // m.kv_heads) // 4)
        groups = (m.kv_heads * packs, splits, rows)
        launch("attention", f"attend_float_d{m.head_dim}_h4", arguments, groups, 128)
        arguments = {0: self.partial, 1: self.statistics, 2: self.projected, 3: self.positions}
        groups = (m.heads, m.head_dim // 32, rows)
        launch("attention", "attend_combine", arguments | {4: self.mixed, 5: shape}, groups, 256)
        self._add(launch, layer["out"], rows, "project_add", {})

    def _experts(self, launch: Step, layer: dict[str, Any], rows: int) -> None:
        m, w, room = self.model, layer["router"], self._room(rows)
        arguments = w.arguments() | {3: self.residual, 4: layer["mlp_norm"], 5: self.router_logits}
        arguments |= {6: self.normed, 7: structure(rows, w.cols, w.rows, w.rows, w.group_shift, EPS, 1)}
        launch("experts", f"route_b{w.bits}_m{room}", arguments, -(-w.rows // 16), 256)
        up, down = layer["up"], layer["down"]
        stride = max(self.width, self.shared)
        shape = structure(
            self.experts, m.top_k, 1, 1, 0, m.top_k + 1, self.width, self.shared, stride, m.top_k + 1,
            m.hidden, up.group_shift, layer["shared_up"].group_shift,
        )  # fmt: skip
        arguments = up.arguments() | layer["shared_up"].arguments(3) | {6: self.normed, 7: self.router_logits}
        arguments |= {8: self.acts, 9: self.routing, 10: shape}
        launch("experts", f"experts_up_b{up.bits}", arguments, (-(-stride // 32), m.top_k + 1, rows), 256)
        arguments = down.arguments() | layer["shared_down"].arguments(3) | {6: self.acts, 7: self.routing}
        arguments |= {8: self.residual, 9: shape}
        launch("experts", f"experts_down_b{down.bits}", arguments, (-(-m.hidden // 16), 1, rows), 128)

    def _head(self, launch: Step, rows: int) -> None:
        w, room = self.head, self._room(rows)
        groups = -(-w.rows // (16 * min(4, 16 // room)))
        arguments = w.arguments() | {3: self.residual, 4: self.final_norm, 5: self.sources, 6: self.logits}
        arguments |= {7: self.hidden, 8: self.best}
        arguments[9] = structure(rows, w.cols, w.rows, w.group_shift, EPS, 1, groups)
        launch("head", f"head_b{w.bits}_m{room}", arguments, groups, 256)
        choice = {0: self.best, 1: self.tokens, 2: self.keys, 3: self.positions}
        launch("head", "argmax", choice | {4: np.uint32(groups), 5: np.uint32(1)}, rows, 256)
