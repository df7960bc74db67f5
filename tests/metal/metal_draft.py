"""A draft head (MTP) as a list of launches, with a cache of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from metal_model import CAPACITY, MetalModel, Step
from metal_reference import EPS, Array, Library, Simulator, structure


class DraftHead(MetalModel):
    """Its layer, and what it shares with the trunk: embedding and output matrix."""

    def __init__(self, sim: Simulator, libraries: dict[str, Library], folder: Path) -> None:
        super().__init__(sim, libraries, folder)
        self.layer = self._layer("mtp.layers.0.", True) | {"cache": 0}
        self.fc = self._packed(["mtp.fc"])
        self.norms = [self._norm(f"mtp.pre_fc_norm_{part}") for part in ("embedding", "hidden")]
        self.final_norm = self._norm("mtp.norm")
        self.embedded, self.trunk = (self._floats(CAPACITY, self.model.hidden) for _ in range(2))

    def draft(self, tokens: Array, hidden: Array | None, rows: int) -> Array:
        """Logits after tokens that each follow a `hidden` row; None takes the last draft's own."""
        m, w, h = self.model, self.fc, self.model.hidden
        self.tokens.array(np.uint32)[:rows] = tokens
        self.positions.array(np.uint32)[:rows] = self.position + np.arange(rows)
        if hidden is not None:
            self.trunk.array(np.float32)[: rows * h] = hidden.astype(np.float32).ravel()
        with self.sim.encoder(concurrent=True) as encoder:
            launch = Step(encoder, self.libraries)
            table: dict[int, Any] = self.table.arguments() | {3: self.tokens, 4: self.embedded}
            table[5] = structure(rows, h, self.table.group_shift)
            launch("head", f"embed_b{self.table.bits}", table, (-(-h // 1024), rows), 32)
            arguments: dict[int, Any] = w.arguments() | {3: self.embedded, 4: self.norms[0]}
            arguments |= {5: self.trunk if hidden is not None else self.hidden, 6: self.norms[1]}
            arguments |= {7: self.sources, 8: self.residual}
            arguments[9] = structure(rows, h, h, h, w.group_shift, EPS)
            launch("combine", f"combine_hidden_b{w.bits}_m{self._room(rows)}", arguments, -(-h // 32), 256)
            self._attention(launch, self.layer, rows)
            self._experts(launch, self.layer, rows)
            self._head(launch, rows)
        assert self.sim.diagnostics() == []
        self.position += rows
        return self.logits.array(np.float32)[: rows * m.vocab].reshape(rows, m.vocab).copy()
