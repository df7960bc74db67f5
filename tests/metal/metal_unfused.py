"""A decode step whose launches do one thing each: the less clever path of every fusion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from metal_model import PAGES, MetalModel, Packed, Step
from metal_reference import EPS, Buffer, Library, Simulator, structure
from test_metal_attention import PAGE


class UnfusedModel(MetalModel):
    """Libraries: those of MetalModel, and the unfused files by their names."""

    def __init__(self, sim: Simulator, libraries: dict[str, Library], folder: Path) -> None:
        super().__init__(sim, libraries, folder)
        rows, h = 8, self.model.hidden
        self.slots = self.model.top_k + 1
        self.stride = max(self.width, self.shared)
        self.raw = self._floats(rows, self.model.value_heads * self.model.value_dim)
        self.product = self._floats(rows, h)
        self.inverses = self._floats(rows, 1)
        self.gate, self.up_rows = (self._floats(rows, self.slots * self.stride) for _ in range(2))
        self.slot_rows = self._floats(rows, self.slots * h)

    def _norm_rows(self, launch: Step, norm: Buffer, rows: int) -> None:
        shape = structure(rows, self.model.hidden, 0, 0, 0, EPS)
        arguments = {0: self.residual, 1: norm, 2: self.normed, 3: self.inverses, 4: shape}
        launch("matrix_simdgroup", "norm_rows", arguments, rows, 256)

    def _product(
        self, launch: Step, w: Packed, x: Buffer, out: Buffer, rows: int, stride: int, kind: str = "project"
    ) -> None:
        per_group = 32 if kind == "project" else 16 * min(4, 16 // self._room(rows))
        shape = structure(rows, w.cols, w.rows, stride, w.group_shift)
        launch(
            "unfused_project",
            f"{kind}_b{w.bits}_m{self._room(rows)}",
            w.arguments() | {3: x, 4: out, 5: shape},
            -(-w.rows // per_group),
            256,
        )

    def _add_product(self, launch: Step, rows: int) -> None:
        count = rows * self.model.hidden
        arguments = {0: self.product, 1: self.residual, 2: np.uint32(count)}
        launch("unfused_project", "add_rows", arguments, -(-count // 256), 256)

    def _project(self, launch: Step, layer: dict[str, Any], rows: int, stride: int) -> None:
        self._norm_rows(launch, layer["input_norm"], rows)
        self._product(launch, layer["project"], self.normed, self.projected, rows, stride)

    def _add(self, launch: Step, w: Packed, rows: int, kind: str, more: dict[int, Any]) -> None:
        self._product(launch, w, self.mixed, self.product, rows, w.rows)
        self._add_product(launch, rows)

    def _delta(self, launch: Step, layer: dict[str, Any], rows: int) -> None:
        m = self.model
        self._project(launch, layer, rows, self.delta_stride)
        arguments = {0: self.projected, 1: layer["conv"], 2: layer["a_log"], 3: layer["dt_bias"]}
        arguments |= {4: layer["norm"], 5: layer["history"], 6: layer["state"], 7: self.raw}
        arguments |= {8: self.squares, 9: self.positions, 11: layer["state"]}
        sizes = (rows, m.key_heads, m.value_heads, m.value_dim, m.kernel, self.delta_stride, 1e-6)
        arguments[10] = structure(*sizes)
        kernel = f"delta_rule_k{m.key_dim // 32}_m{1 if rows == 1 else 8}"
        launch("raw_delta_rule", kernel, arguments, (m.value_dim // 16, m.value_heads), 128)
        arguments = {0: self.raw, 1: self.projected, 2: layer["norm"], 3: self.mixed}
        arguments[4] = structure(m.value_heads, m.value_dim, self.delta_stride, self.channels, EPS)
        launch("raw_delta_rule", "gated_norm", arguments, (m.value_heads, rows), 32)
        self._add(launch, layer["out"], rows, "project", {})

    def _attention(self, launch: Step, layer: dict[str, Any], rows: int) -> None:
        m = self.model
        self._project(launch, layer, rows, self.attention_stride)
        page = self.attention_layers * m.kv_heads * 2 * PAGE * m.head_dim
        offset = layer["cache"] * m.kv_heads * 2 * PAGE * m.head_dim
        shape = structure(
            m.heads, m.kv_heads, m.rotary_dims // 2, self.attention_stride, PAGES, page, offset, PAGES,
            4096, 32768, EPS,
        )  # fmt: skip
        heads = (m.heads + m.kv_heads, rows)
        arguments: dict[int, Any] = {0: self.projected, 1: layer["q_norm"], 2: layer["k_norm"], 3: shape}
        launch("unfused_attention", f"norm_heads_d{m.head_dim}", arguments, heads, 32)
        arguments = {0: self.projected, 1: self.coarse, 2: self.fine, 3: self.positions, 4: shape}
        launch("unfused_attention", f"rotate_heads_d{m.head_dim}", arguments, heads, 32)
        places = {1: self.positions, 2: self.sequences, 3: self.pages, 4: self.cache}
        arguments = {0: self.projected} | places | {5: shape}
        launch("unfused_attention", f"append_float_d{m.head_dim}", arguments, (m.kv_heads, rows), 32)
        arguments = {0: self.projected} | places | {5: self.partial, 6: self.statistics, 7: shape}
        groups = (m.kv_heads * -(-(m.heads // m.kv_heads) // 4), -(-(self.position + rows) // PAGE), rows)
        launch("strided_attention", f"attend_float_d{m.head_dim}_h4", arguments, groups, 128)
        arguments = {0: self.partial, 1: self.statistics, 2: self.projected, 3: self.positions}
        groups = (m.heads, m.head_dim // 32, rows)
        launch("strided_attention", "attend_combine", arguments | {4: self.mixed, 5: shape}, groups, 256)
        self._add(launch, layer["out"], rows, "project", {})

    def _expert_product(
        self,
        launch: Step,
        w: Packed,
        shared: Packed,
        part: tuple[int, int, int],
        ends: tuple[Any, ...],
        rows: int,
    ) -> None:
        """Rows [first, first + outputs) of each expert's stack; ends: input, output, their strides."""
        first, outputs, shared_outputs = part
        x, out, in_row, in_slot, out_slot = ends
        shared_first = first and shared_outputs  # up lies below gate in both stacks, down is alone
        shape = structure(
            self.model.top_k, 1, 0, self.slots, w.rows, first, outputs, w.cols, shared_first, shared_outputs,
            shared.cols, in_row, in_slot, out_slot, w.group_shift, shared.group_shift,
        )  # fmt: skip
        arguments = w.arguments() | shared.arguments(3) | {6: x, 7: self.routing, 8: out, 9: shape}
        groups = (-(-max(outputs, shared_outputs) // 32), self.slots, rows)
        launch("unfused_experts", f"expert_product_b{w.bits}", arguments, groups, 256)

    def _experts(self, launch: Step, layer: dict[str, Any], rows: int) -> None:
        m, w, h = self.model, layer["router"], self.model.hidden
        self._norm_rows(launch, layer["mlp_norm"], rows)
        self._product(launch, w, self.normed, self.router_logits, rows, w.rows, "project_float")
        choice = structure(self.experts, m.top_k, 1, 1)
        launch("unfused_experts", "choose", {0: self.router_logits, 1: self.routing, 2: choice}, rows, 32)
        for first, out in ((0, self.gate), (1, self.up_rows)):
            part = (first * self.width, self.width, self.shared)
            ends = (self.normed, out, h, 0, self.stride)
            self._expert_product(launch, layer["up"], layer["shared_up"], part, ends, rows)
        gated = structure(self.stride, self.stride, self.slots * self.stride)
        arguments: dict[int, Any] = {0: self.gate, 1: self.up_rows, 2: self.acts, 3: gated}
        launch("unfused_project", "swiglu", arguments, (-(-self.stride // 256), self.slots, rows), 256)
        ends = (self.acts, self.slot_rows, self.slots * self.stride, self.stride, h)
        self._expert_product(launch, layer["down"], layer["shared_down"], (0, h, h), ends, rows)
        shape, grid = structure(m.top_k, 1, h), (-(-h // 256), rows)
        arguments = {0: self.slot_rows, 1: self.routing, 2: self.product, 3: shape}
        launch("unfused_experts", "weigh_slots", arguments, grid, 256)
        arguments = {0: self.slot_rows, 1: self.routing, 2: self.residual, 3: shape}
        launch("unfused_experts", "add_shared", arguments, grid, 256)
        self._add_product(launch, rows)
